"""Models that are no language models: an encoder of text and one of images through `loss_fn`.  Case G09, kind K11.

Both have repeated blocks and a head that is a module; the image model has parameters of its own beside the module that
cuts the image, so its embeddings move like a block.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, Outcome, assert_close, start_of, train
from torch import Tensor, nn

import offloadz
from offloadz.plan.errors import ConfigError

SIZES: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 130, "num_hidden_layers": 3, "num_attention_heads": 4, "num_labels": 3,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
DISK = {"parameters": "disk", "gradients": "disk", "optimizer_state": "disk", "activations": "disk", "slots": 2}


def bert() -> nn.Module:
    import transformers as hf

    torch.manual_seed(0)
    config = hf.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **SIZES)
    return hf.BertForSequenceClassification(config)


def vit() -> nn.Module:
    import transformers as hf

    torch.manual_seed(0)
    return hf.ViTForImageClassification(hf.ViTConfig(image_size=16, patch_size=4, **SIZES))


def steps_for(make: Any, count: int = 5, rows: int = 4) -> list[dict[str, Tensor]]:
    source, made = torch.Generator().manual_seed(1), []
    for _ in range(count):
        batch = {"labels": torch.randint(0, 3, (rows,), generator=source)}
        if make is vit:
            batch["pixel_values"] = torch.randn(rows, 3, 16, 16, generator=source)
        else:
            batch["input_ids"] = torch.randint(3, VOCABULARY, (rows, 12), generator=source)
            batch["attention_mask"] = torch.ones(rows, 12, dtype=torch.long)
            batch["attention_mask"][1, 8:] = 0
        made.append(batch)
    return made


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch).loss  # type: ignore[no-any-return]


def plain(make: Any, steps: list[dict[str, Tensor]]) -> Outcome:
    model, out = make(), Outcome()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for batch in steps:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        out.losses.append(float(loss.detach()))
        out.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)))
        optimizer.step()
    out.weights = start_of(model)
    return out


@pytest.mark.parametrize("micro", [4, 2])
@pytest.mark.parametrize("make", [bert, vit])
def test_five_steps_as_in_the_plain_loop(make: Any, micro: int, swap: Path) -> None:
    steps = steps_for(make)
    wanted = plain(make, steps)
    with offloadz.offload(make(), offloadz.AdamW(lr=1e-3), swap=swap, micro_batch_size=micro, **DISK) as run:
        found = train(run, steps, loss_fn=loss_of)
        assert set(run.session.steps.values()) == {5} and set(run.session.steps) >= set(found.weights)
    for name in [n for n in wanted.weights if n.endswith(("key.bias", "k_proj.bias"))]:
        del wanted.weights[name]  # a softmax does not see it: its gradient is rounding, which Adam makes large
    assert_close(found, wanted, start_of(make()), f"micro-batches of {micro}")


def test_embeddings_of_an_image_model_move_as_one(swap: Path) -> None:
    with offloadz.offload(vit(), swap=swap, **DISK) as run:
        held = {
            s.name: {m.name for u in s.units for x in run.session.spec.units[u].sections for m in x.members}
            for s in run.session.spec.seats
        }
    assert {"vit.embeddings.cls_token", "vit.embeddings.position_embeddings"} < held["vit.embeddings"]


def test_encoder_decoders_are_refused_by_name(swap: Path) -> None:
    import transformers as hf

    config = hf.T5Config(vocab_size=VOCABULARY, d_model=48, d_kv=12, d_ff=130, num_layers=2, num_heads=4)
    with pytest.raises(ConfigError, match="T5ForConditionalGeneration is an encoder with a decoder"):
        offloadz.offload(hf.T5ForConditionalGeneration(config), swap=swap)


def test_a_parameter_around_the_blocks_is_refused_by_name(swap: Path) -> None:
    model = bert()
    model.bert.register_parameter("scale", nn.Parameter(torch.ones(1)))
    with pytest.raises(ConfigError, match=r"bert\.scale: a parameter of a module that has the blocks inside"):
        offloadz.offload(model, swap=swap)
