"""Text files and folders as a corpus."""

import sysconfig
from pathlib import Path

import pytest

from patrickstar._cli.corpus import Corpus, open_corpus, standard_library
from patrickstar.errors import DataError


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
