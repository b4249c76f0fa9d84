"""How a model is cut into units and seats, and what its files say about it.

The shapes are compared with real transformers modules, the files are ones that transformers wrote.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offloadz.plan.errors import ConfigError, DamagedState
from offloadz.plan.families import FAMILIES, params_from_config
from offloadz.plan.headers import block_names, model_spec, read_header, spec_from_formula, spec_from_headers
from offloadz.plan.shapes import (
    MAX_TILE_ELEMENTS,
    MIN_TILE_ELEMENTS,
    TILE_ROWS,
    ParamInfo,
    TableInfo,
    make_spec,
    tile_elements,
)
from offloadz.plan.spec import LINE_BYTES, ModelSpec

TINY = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 130,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TINY_GPT2 = {"vocab_size": 211, "n_embd": 48, "n_layer": 12, "n_head": 4, "n_positions": 64}
MODELS = [
    ("llama", TINY),
    ("llama", {**TINY, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("mistral", TINY),
    ("qwen2", TINY),
    ("qwen3", {**TINY, "tie_word_embeddings": True}),
    ("gemma3_text", TINY),
    ("gpt2", TINY_GPT2),
    ("gpt2", {**TINY_GPT2, "n_inner": 100, "tie_word_embeddings": False}),
]


def toy(rows: int = 300, width: int = 8, blocks: int = 3, *, tied: bool = True, **more: object) -> ModelSpec:
    """A spec with a table, blocks of two matrices and two vectors, a norm and a head."""
    params = [ParamInfo("emb.weight", (rows, width))]
    for index in range(blocks):
        name = f"layers.{index}"
        params += [ParamInfo(f"{name}.ln.weight", (width,)), ParamInfo(f"{name}.a.weight", (3 * width, width))]
        params += [ParamInfo(f"{name}.a.bias", (3 * width,)), ParamInfo(f"{name}.b.weight", (width, 3 * width))]
    params += [ParamInfo("norm.weight", (width,))]
    head = "emb.weight" if tied else "head.weight"
    params += [] if tied else [ParamInfo(head, (rows, width))]
    names = [f"layers.{i}" for i in range(blocks)]
    settings_ = {"dtype": "bfloat16", **more}
    return make_spec(params, names, [TableInfo("emb", "emb.weight")], [TableInfo("head", head)], **settings_)  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 70_000), width=st.integers(1, 900), blocks=st.integers(1, 4), tied=st.booleans())
def test_every_element_has_one_place(rows: int, width: int, blocks: int, tied: bool) -> None:
    spec = toy(rows, width, blocks, tied=tied)
    covered: dict[str, int] = {}
    for unit in spec.units:
        for section in unit.sections:
            end = 0
            for member in section.members:
                assert member.start == end, "members lie without gaps"
                end += member.num_elements
                covered[member.name] = covered.get(member.name, 0) + member.num_elements
    per_block = {"ln.weight": width, "a.weight": 3 * width * width, "a.bias": 3 * width, "b.weight": 3 * width * width}
    want = {f"layers.{i}.{name}": n for i in range(blocks) for name, n in per_block.items()}
    want |= {"emb.weight": rows * width, "norm.weight": width} | ({} if tied else {"head.weight": rows * width})
    assert covered == want
    assert {u for seat in spec.seats for u in seat.units} == set(range(len(spec.units))), "no unit without a seat"


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 300_000), width=st.integers(1, 4000))
def test_tiles_are_whole_rows_and_bounded(rows: int, width: int) -> None:
    spec = toy(rows, width, 1)
    most = tile_elements(sum(u.num_elements for u in spec.units if u.kind == "block"))
    tiles = [spec.units[u] for u in spec.seats[0].units]
    next_row = 0
    for tile in tiles:
        (member,) = tile.sections[0].members
        assert (member.first_row, member.shape[1]) == (next_row, width)
        assert tile.num_elements <= max(most, width)
        assert tile.name == f"emb.weight[{next_row}:{next_row + member.shape[0]}]"
        next_row += member.shape[0]
    assert next_row == rows
    most_rows = max(1, most // width)
    assert len(tiles) == -(-rows // most_rows), "no more tiles than needed"
    num_rows = tiles[0].sections[0].members[0].shape[0]
    assert len(tiles) == 1 or num_rows % TILE_ROWS == 0 or num_rows == most_rows, "logits of whole lines"


def test_logits_of_a_262k_vocabulary_are_whole_lines_in_every_tile() -> None:
    """Cut into 31 equal tiles it had 8,457 words in each, and products a third slower."""
    block = [ParamInfo("layers.0.a", (5_573_632,))]
    params, head = [*block, ParamInfo("head.weight", (262_144, 640))], TableInfo("head", "head.weight")
    spec = make_spec(params, ["layers.0"], [], [head], dtype="bfloat16")
    rows = [spec.units[u].sections[0].members[0].shape[0] for u in spec.seats[-1].units]
    assert len(rows) == 31 and sum(rows) == 262_144 and not any(4 * n % LINE_BYTES for n in rows)


def test_tile_bound_follows_the_largest_block() -> None:
    found = [tile_elements(n) for n in (5, MIN_TILE_ELEMENTS + 3, 10**9)]
    assert found == [MIN_TILE_ELEMENTS, MIN_TILE_ELEMENTS + 3, MAX_TILE_ELEMENTS]


def test_sections_are_sorted_by_dtype_then_training_and_hold_matrices_first() -> None:
    spec = toy(keep_float32=["*.ln.*", "*.1.a.bias"], freeze=["layers.1.b.*", "layers.1.ln.*"])
    block = next(u for u in spec.units if u.name == "layers.1")
    found = [(s.dtype, s.trainable, [m.name.split(".", 2)[2] for m in s.members]) for s in block.sections]
    assert found == [
        ("bfloat16", True, ["a.weight"]),
        ("bfloat16", False, ["b.weight"]),
        ("float32", True, ["a.bias"]),
        ("float32", False, ["ln.weight"]),
    ]
    plain = next(u for u in toy().units if u.name == "layers.0")
    assert [m.name for m in plain.sections[0].members] == [
        "layers.0.a.weight", "layers.0.b.weight", "layers.0.ln.weight", "layers.0.a.bias",
    ]  # fmt: skip


def test_seats_stand_in_forward_order_and_a_tied_head_shares_units() -> None:
    spec = toy()
    kinds = [(s.name, s.kind) for s in spec.seats]
    assert kinds == [
        ("emb", "table"), ("layers.0", "block"), ("layers.1", "block"), ("layers.2", "block"),
        ("norm", "module"), ("head", "head"),
    ]  # fmt: skip
    assert spec.shared_units == frozenset(spec.seats[0].units) and spec.seats[0].units == spec.seats[-1].units
    assert not toy(tied=False).shared_units
    turned = toy(order=["emb", "norm", "layers.2", "layers.1", "layers.0", "head"])
    assert [s.name for s in turned.seats][1:3] == ["norm", "layers.2"]
    assert [turned.units[s.units[0]].name for s in turned.seats][1:3] == ["norm", "layers.2"]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"freeze": ["layer.0.*"]}, "model.freeze: 'layer.0.*' matches none"),
        ({"groups": ["layers.*", "*embedd*"]}, "optimizer.groups: '[*]embedd[*]' matches none of the"),
        ({"keep_float32": ["*normm*"]}, "model.keep_float32: '[*]normm[*]'"),
        ({"dtype": "float16"}, "model.dtype = 'float16'"),
        ({"order": ["emb", "norm"]}, "the order has 2 seats, the model 6"),
    ],
)
def test_what_cannot_be_meant_is_refused(more: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        toy(**more)  # type: ignore[arg-type]


def test_each_tile_of_a_head_holds_its_words_of_the_bias() -> None:
    rows = 2 * MAX_TILE_ELEMENTS // 512
    params = [ParamInfo("layers.0.a", (MAX_TILE_ELEMENTS,)), ParamInfo("head.weight", (rows, 512))]
    params.append(ParamInfo("head.bias", (rows,)))
    head = TableInfo("head", "head.weight", "head.bias")
    spec = make_spec(params, ["layers.0"], [], [head], dtype="bfloat16", keep_float32=["head.bias"], freeze=["head.w*"])
    tiles = [spec.units[u] for u in spec.seats[-1].units]
    assert [(m.name, m.shape, m.first_row) for u in tiles for s in u.sections for m in s.members] == [
        ("head.weight", (rows // 2, 512), 0), ("head.bias", (rows // 2,), 0),
        ("head.weight", (rows // 2, 512), rows // 2), ("head.bias", (rows // 2,), rows // 2),
    ]  # fmt: skip
    assert [(s.dtype, s.trainable) for s in tiles[0].sections] == [("bfloat16", False), ("float32", True)]
    with pytest.raises(ValueError, match=r"head\.bias is a parameter of a head that was told of without it"):
        make_spec(params, ["layers.0"], [], [TableInfo("head", "head.weight")], dtype="float32")
    with pytest.raises(ConfigError, match="head and other share a weight and differ in their bias"):
        make_spec(params, ["layers.0"], [], [head, TableInfo("other", "head.weight")], dtype="float32")


def test_a_table_inside_a_block_is_refused_by_name() -> None:
    head = [ParamInfo("layers.0.a", (2, 2)), ParamInfo("head.weight", (9, 2)), ParamInfo("head.bias", (9,))]
    with pytest.raises(ConfigError, match=r"layers\.0\.a: a table inside a block"):
        make_spec(head[:2], ["layers.0"], [TableInfo("layers.0", "layers.0.a")], [], dtype="float32")


def test_experts_inside_layers_are_not_taken_for_blocks() -> None:
    names = [f"model.layers.{i}.mlp.experts.{e}.up.weight" for i in range(3) for e in range(8)]
    assert block_names([*names, "model.norm.weight"]) == [f"model.layers.{i}" for i in range(3)]


@pytest.mark.parametrize(("family", "config"), MODELS, ids=lambda v: v if isinstance(v, str) else "")
def test_shapes_are_the_real_modules(family: str, config: dict[str, object], tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    made = AutoConfig.for_model(family, **config)
    model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    real = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    written = json.loads(made.to_json_string(use_diff=True))
    assert [(p.name, p.shape) for p in params_from_config(written)] == real

    model.save_pretrained(tmp_path, max_shard_size="100KB")  # several shards with an index
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    told = make_spec(
        [ParamInfo(name, shape) for name, shape in real],
        block_names([name for name, _ in real]),
        [TableInfo(n.rpartition(".")[0], n) for n, m in real if "emb" in n or ".wte" in n or ".wpe" in n],
        [TableInfo("lm_head", real[-1][0] if "lm_head" in real[-1][0] else real[0][0])],
        dtype="bfloat16",
    )
    for found in (spec_from_headers(tmp_path, "bfloat16"), spec_from_formula(tmp_path, "bfloat16")):
        assert [(s.name, s.kind, s.units) for s in found.seats] == [(s.name, s.kind, s.units) for s in told.seats]
        assert [(u.name, u.kind, u.weight_bytes) for u in found.units] == [
            (u.name, u.kind, u.weight_bytes) for u in told.units
        ]
        assert found.shared_units == told.shared_units
        assert (found.hidden_size, found.vocab_size, found.num_heads) == (48, 211, 4)


def test_a_family_nobody_wrote_down_is_built_on_meta(tmp_path: Path) -> None:
    config = {**TINY, "model_type": "olmo2", "num_hidden_layers": 2}
    assert "olmo2" not in FAMILIES
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = spec_from_formula(tmp_path, "float32")
    assert [s.name for s in spec.seats][1:3] == ["model.layers.0", "model.layers.1"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "nonesuch"}))
    with pytest.raises(ConfigError, match="nonesuch"):
        spec_from_formula(tmp_path, "float32")


def write_safetensors(path: Path, shapes: dict[str, tuple[int, ...]], data_bytes: int = 0) -> None:
    header = json.dumps({n: {"dtype": "F32", "shape": s, "data_offsets": [0, 0]} for n, s in shapes.items()}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with path.open("r+b") as stream:
        stream.truncate(8 + len(header) + data_bytes)  # sparse: as large as asked, no data


def test_only_headers_are_read(tmp_path: Path) -> None:
    shapes = {f"model.layers.{i}.w.weight": (8192, 8192) for i in range(300)}
    write_safetensors(tmp_path / "model.safetensors", shapes, 80 << 30)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 8192}))
    with open("/proc/self/io") as stream:
        before = int(stream.readline().split()[1])
    assert model_spec(str(tmp_path), "bfloat16").num_elements == 300 << 26
    with open("/proc/self/io") as stream:
        assert int(stream.readline().split()[1]) - before < 1 << 20


def test_the_hubs_gpt2_names_and_masks(tmp_path: Path) -> None:
    shapes = {
        "wpe.weight": (64, 48), "wte.weight": (211, 48), "h.0.attn.bias": (1, 1, 64, 64),
        "h.0.attn.c_attn.weight": (48, 144), "h.0.attn.c_attn.bias": (144,), "ln_f.weight": (48,),
    }  # fmt: skip
    write_safetensors(tmp_path / "model.safetensors", shapes)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **TINY_GPT2}))
    spec = spec_from_headers(tmp_path, "bfloat16")
    assert [s.name for s in spec.seats] == [
        "transformer.wte", "transformer.wpe", "transformer.h.0", "transformer.ln_f", "lm_head",
    ]  # fmt: skip
    assert spec.seats[-1].units == spec.seats[0].units, "the head is tied to words, not to positions"
    assert spec.num_elements == 64 * 48 + 211 * 48 + 48 * 144 + 144 + 48


@pytest.mark.parametrize(
    "content",
    [b"", b"\x01", struct.pack("<Q", 1 << 40) + b"{}", struct.pack("<Q", 9) + b'{"a": 1}]',
     struct.pack("<Q", 2) + b"[]",
     struct.pack("<Q", 26) + b'{"a": {"shape": [1, "b"]}}', struct.pack("<Q", 2) + b"\xff\xfe"],
)  # fmt: skip
def test_a_header_that_is_none_names_its_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(DamagedState, match=r"model\.safetensors"):
        read_header(path)


def test_missing_files_say_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        model_spec(str(tmp_path), "bfloat16")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=r'model\.safetensors is missing.*init = "random"'):
        model_spec(str(tmp_path), "bfloat16")
    with pytest.raises(ConfigError, match="lacks hidden_size"):
        model_spec(str(tmp_path), "bfloat16", init="random")
    with pytest.raises(ConfigError, match="not a directory"):
        model_spec(str(tmp_path / "none"), "bfloat16")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(ConfigError, match=r"gone\.safetensors is missing"):
        model_spec(str(tmp_path), "bfloat16")
