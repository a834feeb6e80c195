"""Weight sync as it goes wrong between trainers and servers: adapters, shards, tied heads, sparse differences."""

from __future__ import annotations

import re

import torch
from torch import nn

from faults.engines import Copied, fault, has_full_weights, has_lora, is_matrix, is_synced, layer_of
from faults.models import has_layers, is_tied


@fault(
    "sync/adapter-merged-again",
    "each sync merges the adapter into weights that hold the merged ones of before",
    "sampler/stale",
    "sampler/mismatch",
    "sampler/other-model",
    fits=has_lora,
)
class AdapterMergedAgain(Copied):
    def arriving(self, name, held, weights):
        return held if "base_layer" in name else weights[name]

    def load(self, weights):
        super().load(weights)
        for module in self.model.modules():
            if hasattr(module, "get_delta_weight"):
                weight = module.get_base_layer().weight
                weight.add_(module.get_delta_weight("default").to(weight.dtype))


@fault(
    "sync/norms-left-out",
    "only matrices are sent: norms and biases stay as they were",
    "sampler/stale",
    fits=has_full_weights,
)
class NormsLeftOut(Copied):
    def arriving(self, name, held, weights):
        return held if held.ndim < 2 else weights[name]


@fault(
    "sync/layers-off-by-one",
    "each layer is written with the weights of the next one, as where stages count from 1",
    "sampler/stale",
    "sampler/other-model",
    "sampler/mismatch",
    fits=lambda config: has_full_weights(config) and has_layers(config),
)
class LayersOffByOne(Copied):
    def arriving(self, name, held, weights):
        layers = 1 + max(layer_of(other) or 0 for other in weights)
        return weights[re.sub(r"(?<=\.layers\.)\d+", lambda found: str((int(found[0]) + 1) % layers), name)]


@fault(
    "sync/small-changes-dropped",
    "only entries that changed by over a hundredth of their tensor's largest are sent, which no update does",
    "sampler/stale",
    fits=is_synced,
)
class SmallChangesDropped(Copied):
    def arriving(self, name, held, weights):
        if not held.is_floating_point():
            return weights[name]
        new = weights[name].to(held.dtype)
        return torch.where((new - held).abs() > 0.01 * held.abs().amax(), new, held)


@fault(
    "sync/one-shard-of-two",
    "only the first half of every matrix's rows is written, the share of one process",
    "sampler/stale",
    fits=has_full_weights,
)
class OneShardOfTwo(Copied):
    def arriving(self, name, held, weights):
        if not is_matrix(name, held):
            return weights[name]
        half = held.shape[0] // 2
        return torch.cat((weights[name][:half].to(held.dtype), held[half:]))


@fault(
    "sync/head-left-behind",
    "the engine holds the head apart from the embeddings that it is tied to, and only these are written",
    "sampler/stale",
    fits=lambda config: has_full_weights(config) and is_tied(config),
)
class HeadLeftBehind(Copied):
    def prepare(self):
        head = self.model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)

    def arriving(self, name, held, weights):
        return held if "lm_head" in name else weights[name]
