"""Our Triton kernels as a GPU compiles them: layers and log-probs of a model, against float64.

What tests show in Triton's interpreter is shown here by the card. The reference is transformers'
own model in float64 on the CPU, one sample at a time.
"""

from collections.abc import Iterator

import torch
from gpu_parts import attention
from gpu_parts.part import Found, Part, within

from telescope_train.models.attention.kinds import ATTENTION_KINDS, AttentionNeeds
from telescope_train.models.fused_layers import Fused, fuse_layers, gpu_kernels


def check(device: torch.device, dtype: torch.dtype, *, num_samples: int = 12) -> Found:
    """Compare log-probs and gradient of a model whose layers have fused kernels."""
    needs = AttentionNeeds(device=device, dtype=dtype)
    kind = next(one for one in ATTENTION_KINDS if one.reason_against(needs) is None)
    lm = attention.model().to(dtype)
    plain, _ = attention.batches(num_samples)
    expected = attention.reference(lm, plain)
    unfused = attention.difference(attention.packed(lm, plain, kind, device), expected)
    fused = Fused(0, 0, 0)

    def fuse(copied: torch.nn.Module) -> None:
        nonlocal fused
        fused = fuse_layers(copied, gpu_kernels(), device, dtype)

    found = attention.difference(attention.packed(lm, plain, kind, device, fuse), expected)
    text = f"{found:.1e}, {unfused:.1e} with the layers' own code; {fused.norms} norms, "
    text += f"{fused.mlps} MLPs, {fused.rotations} rotations fused"
    if not all(fused[:3]):
        return Found(text=text, is_met=False)
    return within(text, found, attention.MOST[dtype])


def parts() -> Iterator[Part]:
    """Yield one part for each dtype that layers compute in."""
    for dtype, most in attention.MOST.items():

        def run(dtype: torch.dtype = dtype) -> Found:
            return check(torch.device("cuda"), dtype)

        yield Part(
            name=f"fused kernels, {str(dtype).removeprefix('torch.')}",
            limit=f"{most:g} from float64, log-probs and gradient",
            run=run,
            num_gpus=1,
        )
