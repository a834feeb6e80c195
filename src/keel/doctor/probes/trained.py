"""Which weights are trained at all."""

from __future__ import annotations

from collections.abc import Iterator

from keel.doctor.findings import Finding, finding
from keel.doctor.keel_subject import KeelSubject

FEW_TRAINED = 0.01  # of the weights


def frozen_findings(setup: KeelSubject) -> Iterator[Finding]:
    """Next to nothing is trained: a few vectors, fewer than the model has layers, and no adapter.

    Methods that train vectors, biases or norms, train them in every layer.
    """
    model, trained = setup.policy.model, setup.run.optimizer.parameters
    weights = sum(p.numel() for p in model.parameters())
    count = sum(p.numel() for p in trained)
    layers = getattr(model.config, "num_hidden_layers", 1)
    if setup.policy.lora is not None or hasattr(model, "peft_config") or count >= FEW_TRAINED * weights:
        return
    if len(trained) > layers or any(p.squeeze().ndim > 1 for p in trained):
        return
    known = {id(p) for p in trained}
    names = [name for name, p in model.named_parameters() if id(p) in known]
    yield finding(
        "optim/no-update",
        f"{count} of {weights} weights are trained, no matrix among them: {', '.join(names)}",
        "the others were frozen, as a loader leaves them that was made for something else: hardly anything can be "
        "learned by these alone",
        "let the weights that should learn require gradients, or set model.lora; nothing, if these alone are meant",
        severity="warning",
    )
