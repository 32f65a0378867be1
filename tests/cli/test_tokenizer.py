"""Text files and folders as a corpus, its tokenizer, their cache, and batches."""

import sysconfig
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from patrickstar._cli.corpus import Corpus, open_corpus, standard_library
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
    monkeypatch.setattr("patrickstar._cli.tokenizer._save", Mock(side_effect=KeyboardInterrupt))
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


def test_training_twice_gives_the_same_tokenizer_and_all_bytes_are_in_it(corpus: Corpus) -> None:
    assert train_tokenizer(corpus, 300).to_str() == train_tokenizer(corpus, 300).to_str()
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


@given(st.integers(1, 9), st.integers(0, 3), st.integers(4, 7), st.integers(1, 12), st.integers(0, 5))
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


# Corpora


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_folder_gives_its_text_files_sorted(tmp_path: Path) -> None:
    b = write(tmp_path / "b.txt", "second")
    a = write(tmp_path / "a" / "z.py", "first")
    write(tmp_path / ".git" / "config", "hidden folder")
    write(tmp_path / ".hidden", "hidden file")
    write(tmp_path / "picture.png", b"\x89PNG\0\0")
    corpus = open_corpus([tmp_path])
    assert corpus.paths == (a, b)
    assert list(corpus.texts()) == ["first", "second"]


def test_places_keep_their_order_and_a_file_is_read_once(tmp_path: Path) -> None:
    b, a = write(tmp_path / "b.txt", "b"), write(tmp_path / "a.txt", "a")
    assert open_corpus([b, tmp_path]).paths == (b, a)


def test_bytes_that_are_not_utf8_are_replaced(tmp_path: Path) -> None:
    file = write(tmp_path / "latin1.txt", "ø and å".encode("latin-1"))
    assert list(open_corpus([file]).texts()) == ["\ufffd and \ufffd"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "there is no file or folder"),
        ("empty.txt", b"", "holds no text"),
        ("binary.txt", b"\0\1", "is not a text file"),
        ("folder/binary", b"\0\1", "holds no text"),
    ],
)
def test_bad_places_are_named(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    place = tmp_path / name.partition("/")[0]
    if content is not None:
        write(tmp_path / name, content)
    good = write(tmp_path / "good" / "text", "text")
    for places in ([place], [good, place]):
        with pytest.raises(DataError, match=message) as caught:
            open_corpus(places)
        assert str(place) in str(caught.value)


def test_the_digest_follows_the_text_and_not_the_place(tmp_path: Path) -> None:
    one, same = write(tmp_path / "one", "text"), write(tmp_path / "same", "text")
    other = write(tmp_path / "other", "texts")
    assert Corpus("one", (one,)).digest() == Corpus("same", (same,)).digest()
    assert Corpus("one", (one,)).digest() != Corpus("other", (other,)).digest()
    # Documents are divided: moving text from one file to the next makes another corpus.
    left = write(tmp_path / "left", "te"), write(tmp_path / "right", "xt")
    assert Corpus("one", (one,)).digest() != Corpus("left", left).digest()


def test_the_default_is_the_standard_library_without_its_tests() -> None:
    corpus = open_corpus([])
    assert corpus == standard_library()
    root = Path(sysconfig.get_path("stdlib"))
    assert root / "argparse.py" in corpus.paths
    assert all(path.suffix == ".py" for path in corpus.paths)
    below = {part for path in corpus.paths for part in path.relative_to(root).parts}
    assert not below & {"site-packages", "dist-packages", "test", "idle_test"}
