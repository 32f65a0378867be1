"""Tokenizer, its cache, and batches."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from patrickstar._cli.corpus import Corpus, open_corpus
from patrickstar._cli.sampler import BatchSampler
from patrickstar._cli.tokenizer import END_TOKEN, cache_folder, load_tokens, train_tokenizer
from patrickstar._models.vocabulary import Vocabulary
from patrickstar.errors import ConfigError, DataError, ModelError

TEXT = "".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(40))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "patrickstar"


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.py").write_text(TEXT)
    (folder / "b.py").write_text("é — 日本語\n")
    return open_corpus([folder])


def test_the_stream_is_every_document_with_an_end_marker(corpus: Corpus, cache: Path) -> None:
    tokens = load_tokens(corpus, Vocabulary(300))
    tokenizer = Tokenizer.from_file(str(next(cache.glob("*.tokenizer.json"))))
    end = tokenizer.token_to_id(END_TOKEN)
    assert end == 0
    documents = np.split(tokens, np.flatnonzero(tokens == end) + 1)
    decoded = [tokenizer.decode(document[:-1].tolist()) for document in documents[:-1]]
    assert decoded == list(corpus.texts())
    assert tokens.dtype == np.uint16
    assert tokens.max() < 300


def test_the_cache_is_used_and_left_whole(corpus, cache, tmp_path, monkeypatch) -> None:
    first = load_tokens(corpus, Vocabulary(300))
    files = sorted(cache.iterdir())
    assert [file.name.partition(".")[2] for file in files] == ["npy", "tokenizer.json"]
    moved = tmp_path / "moved"
    corpus.paths[0].parent.rename(moved)
    monkeypatch.setattr("patrickstar._cli.tokenizer.train_tokenizer", lambda *_: pytest.fail("trained again"))
    again = load_tokens(open_corpus([moved]), Vocabulary(300))
    assert np.array_equal(first, again)
    assert sorted(cache.iterdir()) == files


def test_another_text_or_size_is_another_entry(corpus: Corpus, cache: Path) -> None:
    load_tokens(corpus, Vocabulary(300))
    load_tokens(corpus, Vocabulary(280))
    corpus.paths[0].write_text(TEXT * 2)
    load_tokens(corpus, Vocabulary(280))
    assert len(list(cache.glob("*.npy"))) == 3


def test_an_interrupted_write_leaves_nothing(corpus: Corpus, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("patrickstar._cli.tokenizer._save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_tokens(corpus, Vocabulary(300))
    assert not list(cache.glob("*.npy*"))


def test_a_damaged_cache_names_the_file(corpus: Corpus, cache: Path) -> None:
    load_tokens(corpus, Vocabulary(300))
    stream = next(cache.glob("*.npy"))
    stream.write_bytes(b"not an array")
    with pytest.raises(DataError, match="delete the file") as caught:
        load_tokens(corpus, Vocabulary(300))
    assert str(stream) in str(caught.value)


def test_a_cache_folder_that_cannot_be_made_is_named(corpus: Corpus, cache: Path) -> None:
    cache.parent.write_text("a file where the folder should be")
    with pytest.raises(DataError, match="XDG_CACHE_HOME"):
        load_tokens(corpus, Vocabulary(300))


def test_without_an_absolute_xdg_folder_it_is_below_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_folder() == Path.home() / ".cache" / "patrickstar"


def test_training_twice_gives_the_same_tokenizer(corpus: Corpus) -> None:
    assert train_tokenizer(corpus, 300).to_str() == train_tokenizer(corpus, 300).to_str()


def test_a_vocabulary_below_all_bytes_is_refused(corpus: Corpus) -> None:
    with pytest.raises(ConfigError, match="257 or more"):
        train_tokenizer(corpus, 256)


def test_a_given_tokenizer_is_used(corpus: Corpus, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    given_tokenizer = train_tokenizer(corpus, 270)
    given_tokenizer.save(str(file))
    tokens = load_tokens(corpus, Vocabulary(300, file, end_id=None))
    expected = [i for text in corpus.texts() for i in given_tokenizer.encode(text).ids]
    assert tokens.tolist() == expected


def test_a_given_tokenizer_must_be_readable_and_fit_the_model(corpus: Corpus, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    for content in (None, "{}"):
        if content is not None:
            file.write_text(content)
        with pytest.raises(ModelError, match="can't be read"):
            load_tokens(corpus, Vocabulary(300, file))
    train_tokenizer(corpus, 290).save(str(file))
    with pytest.raises(ModelError, match="290 tokens and the model only 280"):
        load_tokens(corpus, Vocabulary(280, file))


@given(
    blocks=st.integers(1, 9),
    rest=st.integers(0, 3),
    sequence=st.integers(4, 7),
    batch=st.integers(1, 12),
    seed=st.integers(0, 5),
)
def test_every_pass_takes_each_block_once(blocks: int, rest: int, sequence: int, batch: int, seed: int) -> None:
    tokens = np.arange(blocks * sequence + rest, dtype=np.uint16)
    stream = iter(BatchSampler(tokens, sequence, batch, seed))
    drawn = [next(stream) for _ in range(2 * blocks)]  # two passes and more
    assert all(ids.shape == (batch, sequence) and ids.dtype == torch.int64 for ids in drawn)
    rows = torch.cat(drawn)
    assert torch.equal(rows - rows[:, :1], torch.arange(sequence).expand_as(rows))
    starts = (rows[:, 0] // sequence).tolist()
    assert sorted(starts[:blocks]) == sorted(starts[blocks : 2 * blocks]) == list(range(blocks))


def test_the_seed_fixes_the_order() -> None:
    tokens = np.arange(400, dtype=np.uint16)

    def first(seed: int) -> list[list[int]]:
        return next(iter(BatchSampler(tokens, 4, 50, seed))).tolist()

    assert first(1) == first(1)
    assert first(1) != first(2)


def test_too_little_data_says_how_much_there_is() -> None:
    with pytest.raises(DataError, match=r"3 tokens.*one sequence of 4"):
        BatchSampler(np.arange(3, dtype=np.uint16), 4, 1, 0)
