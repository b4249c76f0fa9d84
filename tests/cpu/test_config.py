"""Case G20, kind K20: a configuration is in force as written, or refused as a whole before any work.

Each key is misspelt in every way of the case (letter dropped, two swapped, other case, wrong section) in a file, on the
command line and from Python; wrong types, contradictions, names of other trainers and what is not built are refused.
"""

from pathlib import Path

import pytest

from offloadz.config import config_differences, config_from_tables, load_config, parse_bytes, parse_every
from offloadz.config.names import FOREIGN, FOREIGN_VALUES
from offloadz.config.sections import RULES
from offloadz.config.values import checked
from offloadz.plan.errors import ConfigError

KEYS = [(section, key) for section, keys in RULES.items() for key in keys]
BASE = """
[model]
path = "models/tiny"
[data]
train = ["a.jsonl"]
packing = false
[train]
output = "runs/a"
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return written(tmp_path, BASE)


def written(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def refusal(path: Path, *overrides: str, training: bool = True) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(path, overrides, training=training)
    return str(error.value)


def with_value(section: str, key: str, value: str) -> str:
    """BASE with one key set, replacing what BASE has."""
    lines = [line for line in BASE.splitlines() if not line.startswith(f"{key} =")]
    header = f"[{section}]"
    if header not in lines:
        lines.append(header)
    lines.insert(lines.index(header) + 1, f"{key} = {value}")
    return "\n".join(lines)


def misspelt(key: str) -> list[str]:
    dropped = [key[:at] + key[at + 1 :] for at in range(len(key))]
    swapped = [key[:at] + key[at + 1] + key[at] + key[at + 2 :] for at in range(len(key) - 1)]
    return sorted({*dropped, *swapped, key.upper(), key.capitalize(), key.title()} - {key, ""})


# ---- G20: names ----


@pytest.mark.parametrize(("section", "key"), KEYS)
def test_every_misspelling_is_refused_with_the_nearest_name(tmp_path: Path, section: str, key: str) -> None:
    wrong = misspelt(key)
    assert len(wrong) >= 4 and not set(wrong) & set(RULES[section])
    text = f"[{section}]\n" + "".join(f"{name} = 1\n" for name in wrong)
    path = written(tmp_path, text + ('[model]\npath = "m"\n' if section != "model" else 'path = "m"\n'))
    told = refusal(path, training=False)
    for number, name in enumerate(wrong, 2):  # all in one go, each with its place
        assert f"{section}.{name} ({path}, line {number}): unknown key; nearest is {section}.{key}\n" in told + "\n"
    told = refusal(written(tmp_path, BASE), *(f"{section}.{name}=1" for name in wrong))
    for name in wrong:
        assert f"{section}.{name} (command line): unknown key; nearest is {section}.{key}\n" in told + "\n"
    with pytest.raises(ConfigError, match=f"nearest is {section}.{key}"):
        config_from_tables({section: {wrong[0]: 1}})


@pytest.mark.parametrize(("section", "key"), KEYS)
def test_a_key_in_the_wrong_section_is_told_where_it_belongs(tmp_path: Path, section: str, key: str) -> None:
    others = [other for other in RULES if other != section and key not in RULES[other]]
    path = written(tmp_path, "".join(f"[{other}]\n{key} = 1\n" for other in others))
    told = refusal(path, training=False)
    overrides = refusal(written(tmp_path, BASE), *(f"{other}.{key}=1" for other in others))
    for other in others:
        for text in (told, overrides):
            assert f"{other}.{key} (" in text
            assert f"is a key of [{section}], not of [{other}]; write {section}.{key}" in text


@pytest.mark.parametrize("name", ["lr", "gradients", "path"])
def test_a_key_outside_a_section_is_told_where_it_belongs(tmp_path: Path, name: str) -> None:
    home = next(section for section, keys in RULES.items() if name in keys)
    assert f"write {home}.{name}" in refusal(written(tmp_path, f"{name} = 1\n" + BASE))
    assert f"write {home}.{name}" in refusal(written(tmp_path, BASE), f"{name}=1")


def test_unknown_sections_are_refused_and_looked_into(tmp_path: Path) -> None:
    told = refusal(written(tmp_path, BASE + "[optimzer]\nlrr = 1\n[Offload]\nlr = 1\n"), "trian.steps=3")
    assert "[optimzer]" in told and "nearest is [optimizer]" in told and "nearest is optimizer.lr" in told
    assert "nearest is [offload]" in told and "Offload.lr" in told and "write optimizer.lr" in told
    assert "[trian] (command line): unknown section; nearest is [train]" in told
    assert "needs a table" in refusal(written(tmp_path, 'train = ["a.jsonl"]'))


@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_names_of_other_trainers_are_refused_with_ours(tmp_path: Path, name: str) -> None:
    assert all(name not in keys for keys in RULES.values()), "one of ours: it must not be in the table"
    for text in (f"{name} = 1\n" + BASE, BASE + f"[{name}]\nenabled = true\n", BASE + f"{name.upper()} = 1\n"):
        told = refusal(written(tmp_path, text))
        assert name in told.lower() and FOREIGN[name] in told
    assert FOREIGN[name] in refusal(written(tmp_path, BASE), f"train.{name}=1")


def test_equivalents_name_keys_that_exist() -> None:
    import re

    named = [word for text in FOREIGN.values() for word in re.findall(r"\b([a-z]+)\.([a-z_]+)", text)]
    assert len(named) > 50
    for section, key in named:
        assert (section in RULES and key in RULES[section]) or (section, key) in {("run", "step"), ("metrics", "jsonl")}


def test_notes_are_free(tmp_path: Path) -> None:
    text = BASE.replace("[train]", '[train]\nx-why = "tried 3 rates"') + '[x-notes]\nlr = "two"\n'
    plain = load_config(written(tmp_path, BASE))
    assert load_config(written(tmp_path, text), ["x-a.b=1", "train.x-more=2"]) == plain


# ---- K20: types and values ----

WRONG = {
    "int": ["2e9", "2.0", '"5"', '"None"', "-1", "true", "[1]", "nan", "99999999999999999999"],
    "float": ['"1e-5"', '"None"', "-1.0", "true", "nan", "inf", "[1.0]"],
    "bool": ['"true"', "1", "0", '"None"', '"yes"'],
    "text": ["5", "true", '"None"', '"null"', "[]", "1.5"],
    "texts": ['"None"', "5", "[1]", '[""]', '["None"]', "true", "{a = 1}"],
    "ints": ["5", '["a"]', "[0]", "[1.0]", "[true]"],
    "pair": ["0.9", "[0.9]", "[0.9, 1.0]", "[0.9, -0.1]", '["a", "b"]', "[0.9, 0.95, 0.99]", '"None"'],
    "size": ["22", '"22"', '"22G"', '"-1GiB"', '"0GiB"', '"None"', "true", '"GiB"'],
    "every": ['"30m"', "-5", '"-5min"', "1.5", "true", '"None"', '"0min"', "[1]"],
    "groups": [
        "5",
        '"None"',
        "[1]",
        "[{lr = 1e-6}]",
        '[{match = ["a"]}]',
        '[{match = ["a"], lr = -1}]',
        '[{match = "a", lr = 1e-6}]',
    ],
    "stage": ["4", "-1", '"None"', "true", "1.5"],
}


@pytest.mark.parametrize(("section", "key"), KEYS)
def test_wrong_types_are_refused(tmp_path: Path, section: str, key: str) -> None:
    for value in WRONG[RULES[section][key].kind]:
        told = refusal(written(tmp_path, with_value(section, key, value)))
        assert f"{section}.{key} (" in told and "found " in told and "needs " in told, (value, told)
        assert "problems" not in told, told  # that one thing is wrong and nothing else


@pytest.mark.parametrize(("section", "key"), [(s, k) for s, k in KEYS if RULES[s][k].kind not in ("text", "texts")])
@pytest.mark.parametrize("value", ["None", "null", "none", ""])
def test_null_words_on_the_command_line_are_refused(base: Path, section: str, key: str, value: str) -> None:
    assert f"{section}.{key} (command line): found " in refusal(base, f"{section}.{key}={value}")


@pytest.mark.parametrize("key", ["model.path", "train.output", "offload.swap", "data.chat_template", "model.freeze"])
def test_null_words_are_no_names(base: Path, key: str) -> None:
    for value in ("None", "null", '"None"', "true"):
        assert f"{key} (command line): found " in refusal(base, f"{key}={value}")


CHOICES = [(s, k, c) for s, k in KEYS for c in RULES[s][k].choices]


@pytest.mark.parametrize(("section", "key", "choice"), CHOICES)
def test_misspelt_values_are_refused_with_the_nearest(base: Path, section: str, key: str, choice: str) -> None:
    wrong = choice.upper() if choice.upper() != choice else choice + "x"
    told = refusal(base, f"{section}.{key}={wrong}")
    assert f"{section}.{key}" in told and f"nearest is {choice}" in told


@pytest.mark.parametrize(("section", "key", "choice"), CHOICES)
def test_every_choice_can_be_given(section: str, key: str, choice: str) -> None:
    """The words that mean null elsewhere, too, where they are a choice."""
    assert checked(choice, RULES[section][key]) == choice


def test_keys_of_a_group_are_checked_like_others(base: Path) -> None:
    told = refusal(base, 'optimizer.groups=[{match=["a"], lr=1e-6}, {match=["b"], weigth_decay=0.1}]')
    assert "entry 1 has the unknown key weigth_decay; nearest is weight_decay" in told


def test_bounds_are_told(base: Path) -> None:
    told = refusal(base, "optimizer.betas=[0.9, 1.0]", "optimizer.eps=0", "data.max_length=1", "optimizer.min_lr=1.5")
    assert told.startswith("4 problems")
    for needed in ("below 1", "above 0", "at least 2", "at most 1"):
        assert needed in told


def test_overrides_follow_toml_and_take_bare_words(base: Path) -> None:
    config = load_config(
        base,
        [
            "train.output=runs/2024-01-01 b",
            "model.path='quoted'",
            "train.resume=7",
            "optimizer.lr=1",
            "optimizer.betas=[0.8, 0.9]",
            "offload.swap=/nvme0",
            'model.freeze=["*.norm", "a"]',
            "debug.samples=true",
            "train.save_every=20",
            "offload.host_memory=1.5GiB",
            'optimizer.groups=[{match=["*embed*"], lr=1e-6}]',
        ],
        training=True,
    )
    assert (config.train.output, config.model.path, config.train.resume) == ("runs/2024-01-01 b", "quoted", "7")
    assert config.optimizer.lr == 1.0 and isinstance(config.optimizer.lr, float)
    assert config.optimizer.betas == (0.8, 0.9) and config.offload.swap == ("/nvme0",)
    assert config.model.freeze == ("*.norm", "a") and config.debug.samples is True
    assert config.train.save_every == 20 and config.offload.host_memory_bytes == 3 << 29
    assert config.optimizer.groups[0].match == ("*embed*",) and config.optimizer.groups[0].weight_decay is None


@pytest.mark.parametrize("override", ["optimizer.lr", "=3", "optimizer.lr 3", ""])
def test_overrides_without_a_value_are_refused(base: Path, override: str) -> None:
    assert "needs the form section.key=value" in refusal(base, override)


def test_an_override_given_twice_is_refused(base: Path) -> None:
    assert "given twice" in refusal(base, "train.seed=1", "train.seed=2")


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("22GiB", 22 << 30), ("1.5 TB", 1_500_000_000_000), ("512mib", 512 << 20), ("7B", 7)]
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


def test_rhythms() -> None:
    assert parse_every(100) == (100, 0.0) and parse_every("100") == (100, 0.0) and parse_every(0) == (0, 0.0)
    assert parse_every("30min") == (0, 1800.0) and parse_every("1.5h") == (0, 5400.0) and parse_every("90 s") == (0, 90)


# ---- one go, one source, round trip ----


def test_all_problems_come_in_one_go(tmp_path: Path) -> None:
    text = BASE + 'lr = 1\nsteps = "many"\nfp16 = true\nmicro_batch_size = 64\n[optimzer]\nlrr = 1\n'
    told = refusal(written(tmp_path, text), "model.dtype=float16", "debug.poison=True", "nonsense", training=True)
    assert told.startswith("9 problems in the configuration:")
    assert len(told.splitlines()) == 10
    for words in ("train.lr", "train.steps", "train.fp16", "micro_batch_size", "[optimzer]", "optimzer.lrr"):
        assert words in told
    for words in ("model.dtype", "debug.poison", "nonsense"):
        assert words in told


def test_a_default_that_stands_in_for_a_wrong_value_makes_no_second_problem(base: Path) -> None:
    told = refusal(base, "train.batch_size=-3", "train.micro_batch_size=64")
    assert told.startswith("train.batch_size (command line)") and "problems" not in told


def test_round_trip(base: Path, tmp_path: Path) -> None:
    config = load_config(
        base,
        [
            'train.output=a "b" \\ é\u2028\x7f\t',
            "optimizer.lr=3.0000000000000004e-7",
            'optimizer.groups=[{match=["*a*", "b"], lr=1e-6}, {match=["c"], weight_decay=0.1}]',
            "train.save_every=2h",
            "train.keep_weights=2",
            "offload.swap=/nvme0",
            "offload.zero_stage=0",
            "offload.host_memory=8GiB",
            "optimizer.betas=[0.5, 0.75]",
        ],
    )
    again = tmp_path / "again.toml"
    again.write_text(config.to_toml(), encoding="utf-8")
    assert load_config(again) == config
    assert load_config(again).to_toml() == config.to_toml()
    for section, key in KEYS:  # the effective configuration shows every key
        assert f"\n{key} = " in config.to_toml().split(f"[{section}]")[1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"[train]\noutput = runs/x\n", "line 2"),
        (b"[train\n", "is not TOML"),
        (b"[train]\nseed = 1\nseed = 2\n", "is not TOML"),
        (b"\xff\xfe", "not UTF-8"),
        (b"a = " + b"[" * 5000, "is not TOML"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, text: bytes, words: str) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(text)
    told = refusal(path)
    assert words in told and str(path) in told


def test_missing_files_and_byte_order_marks(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "absent.toml")
    assert "cannot be read" in refusal(tmp_path)
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf" + BASE.encode())
    assert load_config(path).model.path == "models/tiny"


def test_differences_that_matter_on_resume(base: Path) -> None:
    old = load_config(base)
    assert config_differences(old, load_config(base)) == []
    told = config_differences(old, load_config(base, ["optimizer.lr=1e-4", "train.batch_size=8", "offload.slots=3"]))
    assert [line.partition(":")[0] for line in told] == ["train.batch_size", "optimizer.lr"]
    assert "1e-05" in told[1] and "0.0001" in told[1]
    allowed = load_config(base, ["optimizer.lr=1e-4", 'train.resume_with=["optimizer.lr"]'])
    assert config_differences(old, allowed) == []
    assert len(config_differences(old, allowed, every_key=True)) == 2


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, told in FOREIGN_VALUES.items() for value in told])
def test_values_of_other_trainers_are_answered_with_those_of_here(base: Path, key: str, value: str) -> None:
    told = refusal(base, f"{key}={value}")
    assert FOREIGN_VALUES[key][value] in told and f'{key} (command line): found "{value}", ' in told


def test_values_that_are_refused_are_not_offered(base: Path) -> None:
    told, refused = refusal(base, "model.dtype=float8"), RULES["model"]["dtype"].refused
    assert refused and not any(f", {value}" in told for value in refused), told
