"""The memory of a container is its limit, not the machine's."""

from pathlib import Path

import pytest

from heads.core.host_memory import free_memory, total_memory

GIB = 2**30
SECOND = ("", "memory.max", "memory.current", "inactive_file")
FIRST = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def write(folder: Path, files: tuple[str, str, str, str], limit: str, used: int, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / files[1]).write_text(f"{limit}\n")
    (folder / files[2]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{files[3]} {cached}\n")


@pytest.mark.parametrize("files", [SECOND, FIRST], ids=["version 2", "version 1"])
def test_the_limit_of_every_group_around_the_process_holds(files: tuple[str, str, str, str], tmp_path: Path) -> None:
    line = "0::/outer/inner" if files is SECOND else "7:cpu:/other\n9:hugetlb,memory:/outer/inner"
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{line}\n")
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {GIB} kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    machine = total_memory(tmp_path)
    assert machine > 0 and free_memory(tmp_path) == 8 * GIB
    outer = tmp_path / "sys/fs/cgroup" / files[0] / "outer"
    write(outer / "inner", files, "max" if files is SECOND else str(2**63 - 4096), GIB)
    assert (total_memory(tmp_path), free_memory(tmp_path)) == (machine, 8 * GIB)
    write(outer, files, str(GIB // 2), GIB // 4, cached=GIB // 8)
    assert (total_memory(tmp_path), free_memory(tmp_path)) == (GIB // 2, 3 * GIB // 8)
    # A container that sees its own group as the root, under the path that the machine has for it.
    (tmp_path / "proc/self/cgroup").write_text(line.replace("/outer/inner", "/docker/abc") + "\n")
    write(outer.parent, files, str(GIB // 4), GIB)
    assert (total_memory(tmp_path), free_memory(tmp_path)) == (GIB // 4, 0)
