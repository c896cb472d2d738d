"""Prompts and tokenizers: one BOS (E10), no chat template (R12), a reproducible walk with a cursor (R4), files that are wrong."""

import json
import struct
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from config import ConfigError, Data
from data import Encoder, Prompts, Rollout, load_rows, pack_group, unpack_group

WORDS = ["<s>", "</s>", "<pad>", "<|user|>", "<|assistant|>", "hello", "world", "one", "two", "three", "<|end|>"]
BOS, EOS, USER, ASSISTANT, HELLO, WORLD, END = 0, 1, 3, 4, 5, 6, 10
TEMPLATE = ("{{ bos_token }}{% for m in messages %}<|user|> {{ m['content'] }} {% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}")


def tokenizer(folder: Path, adds_bos=False, template="", bos=True, eos=True, pad=False, **files) -> str:
    """A tokenizer of eleven words in `folder`; `files` are more JSON files there, by stem."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens([word for word in WORDS if word.startswith("<")])
    if adds_bos:
        words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    folder.mkdir(exist_ok=True)
    words.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | ({"bos_token": "<s>"} if bos else {})
    settings |= ({"eos_token": "</s>"} if eos else {}) | ({"pad_token": "<pad>"} if pad else {})
    settings |= {"chat_template": template} if template else {}
    for name, content in ({"tokenizer_config": settings} | files).items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder)


MESSAGES = [{"role": "user", "content": "hello world"}]
ROWS = [{"prompt": "one " * (number + 1), "answer": str(number)} for number in range(6)]  # row n is n + 1 tokens long


@pytest.fixture
def encoder(tmp_path):
    return Encoder(tokenizer(tmp_path / "tok"), ())


def prompts(encoder: Encoder, rows=ROWS, seed: int = 0, **settings) -> Prompts:
    return Prompts(rows, Data(**settings), encoder, seed)


def draw(source: Prompts, times: int) -> list[int]:
    return [source.draw().row for _ in range(times)]


# --- E10: BOS


def test_e10_template_with_bos_and_tokenizer_that_adds_bos_give_one(tmp_path):
    """E10: both bring a BOS; two of them shift every position, and nobody trained on that."""
    encoder = Encoder(tokenizer(tmp_path, adds_bos=True, template=TEMPLATE), ())
    assert encoder.tokenizer.encode("hello") == [BOS, HELLO], "the tokenizer of this test must add a BOS"
    assert encoder.encode(MESSAGES) == [BOS, USER, HELLO, WORLD, ASSISTANT]
    assert encoder.encode("hello world") == [BOS, HELLO, WORLD]
    assert encoder.encode("<s> hello world") == [BOS, HELLO, WORLD], "text that already begins with the BOS"


@pytest.mark.parametrize("adds_bos", [True, False])
def test_e10_a_template_without_bos_gets_none(adds_bos, tmp_path):
    """E10's neighbour: messages are what the template says, also if the tokenizer would add a BOS to plain text (Qwen has none)."""
    encoder = Encoder(tokenizer(tmp_path, adds_bos=adds_bos, template=TEMPLATE.replace("{{ bos_token }}", "")), ())
    assert encoder.encode(MESSAGES) == [USER, HELLO, WORLD, ASSISTANT]


def test_e10_no_bos_token_and_repeated_first_words(tmp_path):
    """Only BOS is deduplicated: a prompt that begins with a word twice keeps both; without a bos_token nothing is dropped."""
    assert Encoder(tokenizer(tmp_path / "a"), ()).encode("hello hello world") == [HELLO, HELLO, WORLD]
    assert Encoder(tokenizer(tmp_path / "b", bos=False), ()).encode("<s> <s> hello") == [BOS, BOS, HELLO]


def test_e10_the_prompt_carries_the_ids_that_everyone_uses(tmp_path):
    """E10: Prompt.ids are the encoder's; engine and learner get these and never encode again. The raw prompt goes to the grader."""
    encoder = Encoder(tokenizer(tmp_path, adds_bos=True, template=TEMPLATE), ())
    prompt = prompts(encoder, [{"prompt": MESSAGES, "answer": "7", "level": 2}]).draw()
    assert prompt.ids == [BOS, USER, HELLO, WORLD, ASSISTANT] and prompt.prompt == MESSAGES
    assert prompt.columns == {"answer": "7", "level": 2} and prompt.row == 0


# --- R12: template, pad, eos, stop


def test_r12_messages_without_a_chat_template(encoder):
    """R12: a made-up format would train something nobody asked for: clear error; plain strings work."""
    with pytest.raises(ConfigError, match="`data.prompt_column` holds messages, but the tokenizer has no chat template"):
        prompts(encoder, [{"prompt": MESSAGES}]).draw()
    assert encoder.encode("hello world") == [HELLO, WORLD]


def test_r12_no_pad_token_works(encoder):
    """R12: nothing here pads, so that no pad token is needed."""
    assert encoder.tokenizer.pad_token is None
    assert prompts(encoder).draw().ids and encoder.decode([HELLO, WORLD]) == "hello world"


def test_stop_ids_come_from_tokenizer_generation_config_and_config(tmp_path):
    """Llama-3 Instruct ends its turns with an id that only generation_config.json names: without it every response is truncated."""
    folder = tokenizer(tmp_path, generation_config={"eos_token_id": [EOS, 7, 9]}, config={"eos_token_id": 8})
    assert sorted(Encoder(folder, ()).stop_ids) == [EOS, 7, 8, 9]
    assert sorted(Encoder(folder, ("<|end|>",)).stop_ids) == [EOS, 7, 8, 9, END]
    assert sorted(Encoder(tokenizer(tmp_path / "plain", generation_config={"eos_token_id": None}), ()).stop_ids) == [EOS]
    assert Encoder(folder, ()).vocab == len(WORDS)


def test_no_eos_anywhere_is_refused_unless_a_stop_is_named(tmp_path):
    """Without an end every sample runs to its limit."""
    folder = tokenizer(tmp_path, eos=False)
    with pytest.raises(ConfigError, match="no eos token is known there; name a `rollout.stop` string"):
        Encoder(folder, ())
    assert sorted(Encoder(folder, ("<|end|>",)).stop_ids) == [END]


def test_a_folder_without_tokenizer_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=f"`model.path` = '{tmp_path}/none': no usable tokenizer there"):
        Encoder(str(tmp_path / "none"), ())


# --- order and cursor


def test_every_epoch_is_a_permutation_and_each_is_another(encoder):
    """Each row once an epoch, in an order that depends on seed and epoch; shuffle=false keeps the file's order."""
    epochs = [draw(source, 6) for source in [prompts(encoder)] for _ in range(20)]
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs) and len(set(map(tuple, epochs))) > 10
    assert draw(prompts(encoder), 120) == sum(epochs, [])
    assert draw(prompts(encoder, seed=1), 60) != sum(epochs, [])[:60]
    assert draw(prompts(encoder, shuffle=False), 13) == [0, 1, 2, 3, 4, 5] * 2 + [0]


@pytest.mark.parametrize("at", [3, 4, 6, 12, 17])
@pytest.mark.parametrize("limit", [1024, 4])
def test_r4_a_cursor_continues_the_same_sequence(at, limit, encoder):
    """R4: 6 rows, stopped in an epoch or at its end: a fresh Prompts with that cursor draws what the first would have drawn."""
    whole = prompts(encoder, max_prompt_tokens=limit)
    while whole.cursor < at:
        whole.draw()
    resumed = prompts(encoder, max_prompt_tokens=limit)
    resumed.cursor = whole.cursor
    assert draw(resumed, 20) == draw(whole, 20) and resumed.cursor == whole.cursor


def test_a_used_walk_can_be_set_back(encoder):
    """The cursor alone is the state: nothing of the epoch drawn before may remain."""
    source = prompts(encoder)
    first = draw(source, 15)
    source.cursor = 0
    assert draw(source, 15) == first


def test_too_long_prompts_are_skipped_and_counted(encoder):
    """Rows of 1...6 tokens, at most 4: rows 4 and 5 never come, and both are counted in every epoch."""
    source = prompts(encoder, max_prompt_tokens=4)
    rows = draw(source, 12)
    assert sorted(rows) == sorted([0, 1, 2, 3] * 3)
    assert source.skipped == source.cursor - 12 and 4 <= source.skipped <= 6


def test_all_prompts_too_long_is_an_error_not_a_spin(encoder):
    """An endless search for a prompt that fits would be a silent hang."""
    with pytest.raises(ConfigError, match="`data.max_prompt_tokens` = 1: every row's prompt is longer; raise it"):
        prompts(encoder, ROWS[1:], max_prompt_tokens=1).draw()


@pytest.mark.parametrize("seed", range(5))
def test_one_row_that_fits_is_found_in_every_epoch(seed, encoder):
    """The search starts within an epoch: a row early in this one and late in the next is further than one epoch away."""
    source = prompts(encoder, seed=seed, max_prompt_tokens=1)
    assert draw(source, 30) == [0] * 30


def test_missing_column_and_empty_prompt_name_column_row_and_columns(encoder):
    """A data set with `question` instead of `prompt`: the message says which columns there are."""
    with pytest.raises(ConfigError, match=r"`data.prompt_column` = 'prompt': row 0 of 'x.jsonl' has no prompt there "
                                          r"\(its columns: question, answer\)"):
        prompts(encoder, [{"question": "one", "answer": "two"}], path="x.jsonl").draw()
    for empty in ("", [], None, 3, {"role": "user"}):
        with pytest.raises(ConfigError, match="row 1 of .* has no prompt there"):
            draw(prompts(encoder, [{"prompt": "one"}, {"prompt": empty}], shuffle=False), 2)
    assert prompts(encoder, [{"question": "one two", "answer": "x"}], prompt_column="question").draw().columns == {"answer": "x"}


def test_no_rows_is_a_config_error(encoder):
    with pytest.raises(ConfigError, match="`data.path` = 'x.jsonl' has no rows"):
        prompts(encoder, [], path="x.jsonl")


# --- files


def test_jsonl_rows(tmp_path):
    """Blank lines are no rows; a line separator inside a string is not the end of a line (json.dumps leaves U+2028 as it is)."""
    rows = [{"prompt": "é 汉 🦙", "n": 1}, {"prompt": "a\u2028b\u2029c\x85d\x0be", "n": None}]
    file = tmp_path / "x.jsonl"
    file.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", encoding="utf-8")
    assert load_rows(str(file), "train", "data.path") == rows


@pytest.mark.parametrize("line", ["{\"prompt\": ", "nonsense", "[1, 2]", "3", "null", "\"text\""])
def test_jsonl_with_a_bad_line_names_it(line, tmp_path):
    """The line's number, not a traceback a thousand draws later; a line that is JSON but no object is as wrong."""
    file = tmp_path / "x.jsonl"
    file.write_text('{"prompt": "one"}\n\n' + line + '\n{"prompt": "two"}\n')
    with pytest.raises(ConfigError, match=r"`data.eval_path` = .*x.jsonl': line 3 is not"):
        load_rows(str(file), "train", "data.eval_path")


@pytest.mark.parametrize("name", ["none.jsonl", "none.parquet", "none", "no/such-data-set"])
def test_missing_data_is_a_config_error_that_names_the_field(name, tmp_path):
    path = name if "/" in name else str(tmp_path / name)
    with pytest.raises(ConfigError, match=f"`data.eval_path` = '{path}'"):
        load_rows(path, "train", "data.eval_path")


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """Three rows as a parquet file, a saved Dataset and a saved DatasetDict; the library's cache stays in tmp_path."""
    import datasets
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"prompt": f"one {number}", "answer": number, "tags": ["a", "b"]} for number in range(3)]
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(str(tmp_path / "x.parquet"))
    table.save_to_disk(str(tmp_path / "single"))
    datasets.DatasetDict({"train": table, "test": table.select([2])}).save_to_disk(str(tmp_path / "splits"))
    return tmp_path, rows


def test_parquet_and_saved_folders(saved):
    """The three formats besides JSON lines give the same rows; a DatasetDict gives the split that is asked for."""
    folder, rows = saved
    for name in ("x.parquet", "single", "splits"):
        assert load_rows(str(folder / name), "train", "data.path") == rows
    assert load_rows(str(folder / "splits"), "test", "data.path") == rows[2:]


def test_unknown_split_names_those_that_exist(saved):
    """The default split of another data set: an error that lists the choices."""
    with pytest.raises(ConfigError, match=r"`data.eval_path` = .*splits' has the splits \['test', 'train'\], not 'dev'"):
        load_rows(str(saved[0] / "splits"), "dev", "data.eval_path")


def test_messages_from_a_saved_data_set_are_encoded(saved, tmp_path):
    """A messages column survives Arrow as a list of dicts: it goes through the template like one from JSON."""
    import datasets
    datasets.Dataset.from_list([{"prompt": MESSAGES}]).to_parquet(str(tmp_path / "chat.parquet"))
    rows = load_rows(str(tmp_path / "chat.parquet"), "train", "data.path")
    encoder = Encoder(tokenizer(tmp_path / "tok", template=TEMPLATE), ())
    assert prompts(encoder, rows).draw().ids == [BOS, USER, HELLO, WORLD, ASSISTANT]


@pytest.mark.parametrize("content", [b"", b"not parquet at all"])
def test_a_broken_parquet_is_a_config_error(content, saved):
    """A half-copied file: one line that names it."""
    file = saved[0] / "broken.parquet"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="`data.path` = .*broken.parquet"):
        load_rows(str(file), "train", "data.path")


# --- rollouts on the wire


def test_rollouts_survive_the_wire_bit_for_bit():
    """fp32 logprobs come back with the same bits, also -0.0 and the smallest; responses of any length, the largest ids."""
    odd = [struct.unpack("f", struct.pack("I", bits))[0] for bits in (0x80000000, 0x00000001, 0xBF7FFFFF, 0xC47A0001)]
    group = [Rollout([5, 151_935, 0, 1, 2, 3, 2**31 - 1], 3, odd, [0, 0, 1, 2**20]), Rollout([7], 1, [], []),
             Rollout(list(range(70_000)), 69_999, [-0.5], [3])]
    back = unpack_group(pack_group(group))
    assert back == group and [struct.pack("f", x) for x in back[0].logprobs] == [struct.pack("f", x) for x in odd]
    assert unpack_group(pack_group([])) == []
