"""Prompts: rows from a file, encoded once, drawn in a reproducible order with a cursor. Rollouts: plain data and its bytes.

Token ids go in and token ids come out: text exists only here, around grading, and in logs. A plain string prompt is encoded as
the tokenizer would (with a BOS only if it adds one, and once); a list of {role, content} messages goes through the chat template,
which brings its own special tokens.
"""

import json
import random
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load, save

from config import ConfigError, Data


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row: its token ids, what is handed to the reward function, and its number in the data."""
    ids: list[int]
    prompt: str | list[dict]
    columns: dict
    row: int


def load_rows(path: str, split: str, field: str) -> list[dict]:
    """Rows of a .jsonl/.parquet file, a saved `datasets` folder, or a hub data set. Raises ConfigError naming `field`."""
    file = Path(path)
    if file.suffix == ".jsonl":
        if not file.is_file():
            raise ConfigError(f"`{field}` = {path!r}: no such file")
        rows = []
        for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):  # splitlines() would cut at U+2028
            if not line.strip():
                continue
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ConfigError(f"`{field}` = {path!r}: line {number} is not JSON ({error})") from None
            if not isinstance(rows[-1], dict):
                raise ConfigError(f"`{field}` = {path!r}: line {number} is not an object")
        return rows
    import datasets  # slow to import, and not needed for JSON lines
    try:
        if file.suffix == ".parquet":
            return datasets.load_dataset("parquet", data_files=str(file), split="train").to_list()
        found = datasets.load_from_disk(path) if file.is_dir() else datasets.load_dataset(path)
    except (FileNotFoundError, ConnectionError, ValueError) as error:
        raise ConfigError(f"`{field}` = {path!r}: {type(error).__name__}: {error}") from None
    if isinstance(found, dict):
        if split not in found:
            raise ConfigError(f"`{field}` = {path!r} has the splits {sorted(found)}, not {split!r}; set the split")
        found = found[split]
    return found.to_list()


class Encoder:
    """A tokenizer with the few answers that the rest needs: prompt ids, response text, the ids that end a response."""

    def __init__(self, folder: str, stop: tuple[str, ...] = (), field: str = "model.path"):
        from transformers import AutoTokenizer  # slow to import: only ranks that need text pay for it
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise ConfigError(f"`{field}` = {folder!r}: no usable tokenizer there ({' '.join(str(error).split())})") from None
        self.vocab = len(self.tokenizer)
        single = {text: ids[0] for text in stop if len(ids := self.tokenizer.encode(text, add_special_tokens=False)) == 1}
        self.stop_ids = frozenset(self._eos_ids(Path(folder)) | set(single.values()))
        self.stop = tuple(stop)  # a single-token string may also come about from other tokens
        if not self.stop_ids and not self.stop:
            raise ConfigError(f"`{field}` = {folder!r}: no eos token is known there; name a `rollout.stop` string")

    def _eos_ids(self, folder: Path) -> set[int]:
        found = {self.tokenizer.eos_token_id}
        for name in ("generation_config.json", "config.json"):  # Llama-3 Instruct ends turns with an id only named here
            file = folder / name
            eos = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
            found |= set(eos) if isinstance(eos, list) else {eos}
        return {eos for eos in found if eos is not None}

    def encode(self, prompt: str | list[dict]) -> list[int]:
        """Token ids of a prompt, with at most one BOS. Raises ConfigError for messages without a chat template."""
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
        elif self.tokenizer.chat_template is None:
            raise ConfigError("`data.prompt_column` holds messages, but the tokenizer has no chat template; "
                              "use a column with plain strings, which are encoded as they are")
        else:
            text = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
            ids = self.tokenizer.encode(text, add_special_tokens=False)
        bos = self.tokenizer.bos_token_id
        while len(ids) > 1 and bos is not None and ids[0] == ids[1] == bos:
            ids = ids[1:]
        return ids

    def encode_response(self, prompt: str | list[dict], response: str | list[dict]) -> list[int]:
        """Token ids of a given response behind its prompt, with the EOS that ends it. Raises ConfigError as `encode` does."""
        text = response
        if isinstance(prompt, list):
            template = self.tokenizer.apply_chat_template
            before = template(prompt, add_generation_prompt=True, tokenize=False)
            turns = response if isinstance(response, list) else [{"role": "assistant", "content": response}]
            text = template(prompt + turns, tokenize=False)
            if not text.startswith(before):
                raise ConfigError("the chat template changes a prompt when a response follows; give plain strings instead")
            text = text[len(before):]
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        ends = [at for at, token in enumerate(ids) if token in self.stop_ids]
        if ends:
            return ids[:ends[-1] + 1]  # a template may go on with a line break, which no engine would sample
        return ids if self.tokenizer.eos_token_id is None else [*ids, self.tokenizer.eos_token_id]

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)  # " ." is not "."


class Detokenizer:
    """The text of a response while its tokens arrive, and whether a stop string has come up in it.

    A character can be several tokens and a stop string can lie across tokens, so `text` trails behind: an unfinished character is
    held back until it is complete, and `settled` also holds back what may turn out to be the beginning of a stop string. What
    `close` returns is one decode of all tokens, cut before the first stop string.
    """

    def __init__(self, tokenizer, stop: tuple[str, ...] = ()):
        self.tokenizer, self.stop = tokenizer, stop
        self.ids: list[int] = []
        self.text, self.stopped = "", False
        self._context = self._read = 0  # ids decoded again for context (spaces depend on it); ids whose text is out

    def push(self, token: int) -> bool:
        """Take the next token; true once a stop string is complete."""
        self.ids.append(token)
        window = self._decode(self._context, len(self.ids))
        if not window.endswith("\ufffd"):  # else an unfinished character
            self._extend(window)
        return self.stopped

    def _extend(self, window: str) -> None:
        known = len(self._decode(self._context, self._read))
        if self.stopped or len(window) <= known:
            return
        searched = max(0, len(self.text) + 1 - max(map(len, self.stop), default=0))
        self.text += window[known:]
        self._context, self._read = self._read, len(self.ids)
        found = [at for text in self.stop if (at := self.text.find(text, searched)) >= 0]
        if found:
            self.text, self.stopped = self.text[:min(found)], True

    @property
    def settled(self) -> str:
        """The text that no later token can take back."""
        if self.stopped:
            return self.text
        held = max((size for text in self.stop for size in range(1, len(text)) if self.text.endswith(text[:size])), default=0)
        return self.text[:len(self.text) - held]

    def close(self) -> str:
        """No token will follow: the whole text, an unfinished character at its end as U+FFFD."""
        self._extend(self._decode(self._context, len(self.ids)))
        return self.text

    def _decode(self, first: int, last: int) -> str:
        return self.tokenizer.decode(self.ids[first:last], skip_special_tokens=True, clean_up_tokenization_spaces=False)


class Prompts:
    """An endless, shuffled walk over the rows. `cursor` counts the rows drawn: the same seed and cursor give the same prompt.

    Raises ConfigError, when made, for a row without a prompt or with a column that is not plain data.
    """

    def __init__(self, rows: list[dict], data: Data, encoder: Encoder, seed: int):
        if not rows:
            raise ConfigError(f"`data.path` = {data.path!r} has no rows")
        self.rows, self.data, self.encoder, self.seed = rows, data, encoder, seed
        for row in range(len(rows)):
            self._check_row(row)
        self.cursor = self.skipped = 0
        self._epoch, self._order = -1, []

    def draw(self) -> Prompt:
        """The next prompt that fits `max_prompt_tokens`. Raises ConfigError if a whole epoch has none."""
        for _ in range(2 * len(self.rows)):  # from the middle of one epoch, the end of the next has seen every row
            epoch, place = divmod(self.cursor, len(self.rows))
            if epoch != self._epoch:
                self._epoch, self._order = epoch, list(range(len(self.rows)))
                if self.data.shuffle:
                    random.Random(f"{self.seed}/{epoch}").shuffle(self._order)
            self.cursor += 1
            prompt = self.encode(self._order[place])
            if self._fits(prompt):
                return prompt
            self.skipped += 1
        raise ConfigError(f"`data.max_prompt_tokens` = {self.data.max_prompt_tokens}: every row's prompt is longer; raise it")

    def fingerprint(self) -> int:
        """Changes with any row: a cursor means nothing in other data."""
        return zlib.crc32("\n".join(json.dumps(row, sort_keys=True) for row in self.rows).encode())

    def fitting(self) -> list[Prompt]:
        """Every row that fits `max_prompt_tokens`, in the file's order. Raises ConfigError if there is none."""
        prompts = [prompt for prompt in map(self.encode, range(len(self.rows))) if self._fits(prompt)]
        if not prompts:
            raise ConfigError(f"`data.max_prompt_tokens` = {self.data.max_prompt_tokens}: every prompt of {self.data.path!r} "
                              "is longer; raise it")
        return prompts

    def _fits(self, prompt: Prompt) -> bool:
        return 0 < len(prompt.ids) <= self.data.max_prompt_tokens  # a normalizer may leave nothing of a text

    def encode(self, row: int) -> Prompt:
        """Row number `row` as a Prompt. Raises ConfigError for messages without a chat template."""
        columns = dict(self.rows[row])
        prompt = columns.pop(self.data.prompt_column)
        return Prompt(self.encoder.encode(prompt), prompt, columns, row)

    def _check_row(self, row: int) -> None:
        columns, name = self.rows[row], self.data.prompt_column
        if not columns.get(name) or not isinstance(columns[name], str | list):
            raise ConfigError(f"`data.prompt_column` = {name!r}: row {row} of {self.data.path!r} has no prompt there "
                              f"(its columns: {', '.join(columns)})")
        for column, value in columns.items():
            try:
                json.dumps(value)  # columns travel to the actors and their graders
            except TypeError as error:
                raise ConfigError(f"column {column!r} of {self.data.path!r}: {error}; store it as a string or number") from None


@dataclass(frozen=True, slots=True)
class Rollout:
    """A finished sample: token ids as sampled, with the engine's logprob and weight version of each response token."""
    tokens: list[int]  # prompt first
    num_prompt: int
    logprobs: list[float]
    versions: list[int]


def pack_group(rollouts: list[Rollout]) -> bytes:
    """A group's samples as safetensors bytes; fp32 logprobs survive bit for bit."""
    flat = {
        "tokens": np.array([token for rollout in rollouts for token in rollout.tokens], np.int32),
        "logprobs": np.array([logprob for rollout in rollouts for logprob in rollout.logprobs], np.float32),
        "versions": np.array([version for rollout in rollouts for version in rollout.versions], np.int32),
        "sizes": np.array([(len(rollout.tokens), rollout.num_prompt) for rollout in rollouts], np.int32).reshape(-1, 2),
    }
    return save(flat)


def unpack_group(data: bytes) -> list[Rollout]:
    """Inverse of `pack_group`."""
    flat = load(data)
    rollouts, token, generated = [], 0, 0
    for size, num_prompt in flat["sizes"].tolist():
        responses = slice(generated, generated + size - num_prompt)
        rollouts.append(Rollout(flat["tokens"][token:token + size].tolist(), num_prompt,
                                flat["logprobs"][responses].tolist(), flat["versions"][responses].tolist()))
        token, generated = token + size, responses.stop
    return rollouts
