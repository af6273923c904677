"""Whether a device computes what the CPU computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnlens.models.probe import probe_tokens

if TYPE_CHECKING:
    from attnlens.models.model import Model

#: Relative difference of the logits above which a device is not believed, by dtype.
TOLERANCE = {"float64": 1e-6, "float32": 1e-2, "float16": 5e-2, "bfloat16": 1e-1}


def device_problem(model: Model, reference: Model) -> str | None:
    """Compare a short forward pass with that of the same model on the CPU.

    Some devices give plausible numbers that are wrong. What a forward pass may differ by is
    rounding: the norm of the logits' difference is compared with the norm of the logits.

    Parameters
    ----------
    model : Model
        On the device in question.
    reference : Model
        The same weights on the CPU.

    Returns
    -------
    str or None
        What is wrong, for people; None if nothing is.
    """
    padding = getattr(model.tokenizer, "pad_token_id", None)
    tokens = probe_tokens(reference.facts, padding)
    seen, expected = (_logits(m, tokens) for m in (model, reference))
    difference = float((seen - expected).norm() / expected.norm().clamp_min(1e-30))
    tolerance = TOLERANCE.get(model.facts.dtype, 1e-2)
    if difference <= tolerance:
        return None
    return (
        f"The device {model.facts.device} gives other numbers than the CPU: its logits differ by "
        f"{difference:.1%} ({tolerance:.1%} would be rounding). Do not trust what follows; use "
        "--device cpu."
    )


def _logits(model: Model, tokens: Any) -> Any:
    return model.forward(tokens).detach().to("cpu").double()
