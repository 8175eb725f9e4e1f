"""A short hash by which a head knows the weights that it was trained for."""

import hashlib

import torch
from transformers import PreTrainedModel

from heads.target.mapped_files import MappedFiles

FINGERPRINT_SAMPLES = 512
"""Number of weights read of each parameter: enough to distinguish fine-tunes, few enough for a 70B model."""


@torch.no_grad()
def fingerprint(model: PreTrainedModel) -> str:
    """Return a short hash of the architecture and of a sample of every parameter, the same in every dtype wider than
    bfloat16."""
    digest, files = hashlib.sha256(type(model).__name__.encode()), MappedFiles()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        if parameter.is_meta:
            continue
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, len(flat) // FINGERPRINT_SAMPLES)][:FINGERPRINT_SAMPLES]
        digest.update(sample.to(torch.bfloat16).cpu().view(torch.int16).numpy().tobytes())
        files.forget(parameter)  # the pages around each sample
    return digest.hexdigest()[:16]
