"""Memory of the machine, or of the container that this process runs in: its limit is often far below the machine's.

Linux keeps the limits of a container in a control group. A group lies in others, whose limits hold, too. Of the memory
that a group uses, the pages of files that were not read lately (`inactive_file`) are free for others, as in
`MemAvailable`.
"""

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
LIMITS = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Files of limit and use, and the entry of `memory.stat`, by the controllers of a line of /proc/self/cgroup: version 2
of control groups names none, version 1 has a hierarchy for memory."""


def total_memory(root: Path = ROOT) -> int:
    """Return the bytes that this process may use at most, with all others of its container."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(limit for limit, _ in group_limits(root))])


def free_memory(root: Path = ROOT) -> int | None:
    """Return the bytes that are free for this process; None on systems that do not say."""
    lines = read_text(root / "proc/meminfo").splitlines()
    facts = dict(line.split(":", 1) for line in lines)
    free = [max(0, limit - used) for limit, used in group_limits(root)]
    if "MemAvailable" in facts:
        free.append(int(facts["MemAvailable"].split()[0]) * 1024)
    return min(free, default=None)


def group_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit and the bytes in use of each control group around this process that has a limit."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in LIMITS.keys() & {*controllers.split(",")}:
            limit_file, use_file, cached = LIMITS[controller]
            mount = root / "sys/fs/cgroup" / controller
            group = mount / path.strip("/")
            # Inside a container, the path may be that of the machine, which the container does not see.
            for folder in (group, *group.parents):
                limit = read_text(folder / limit_file).strip()
                used = read_text(folder / use_file).strip()
                if limit.isdigit() and used.isdigit():
                    stat = dict(row.split() for row in read_text(folder / "memory.stat").splitlines())
                    yield int(limit), int(used) - int(stat.get(cached, 0))
                if folder == mount:
                    break


def read_text(path: Path) -> str:
    """Return the text of a file, empty if it cannot be read."""
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
