"""Make a corpus of real text for :mod:`.train`: ``python -m examples.gpt.corpus --help``.

The text is the English documentation of Linux, Python, LLVM, Perl and Vim, as Debian 12 packages ship it.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import random
import re
import tarfile
import urllib.error
import urllib.parse
import urllib.request
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from mtagen.errors import InputError, explain

from ..runs import one_line, publish_bytes, publish_json
from .data import ABOUT, TOKENIZER, TRAIN, VALIDATION, encode_tokens

MIRROR = "https://deb.debian.org/debian"
END = "<|endoftext|>"  # follows each document
LARGEST_VOCABULARY = 2**16
SHORTEST_DOCUMENT = 400  # characters
SHORTEST_REPEAT = 120  # characters; a repeated paragraph of this length or more is dropped
MOST_FOREIGN = 0.02  # fraction of a document's characters that may be outside of ASCII


@dataclass(frozen=True)
class Package:
    """A Debian package, and the patterns that select its documents.

    Attributes:
        name: name of the package.
        version: version of the package.
        path: path of the package on a mirror.
        sha256: hash of the package's file.
        licence: licence of the documents.
        documents: pattern that a document's path must contain.
        excluded: pattern that a document's path must not contain.
    """

    name: str
    version: str
    path: str
    sha256: str
    licence: str
    documents: str
    excluded: str = "$^"


PACKAGES = (
    Package(
        "linux-doc-6.1",
        "6.1.176-1",
        "pool/main/l/linux/linux-doc-6.1_6.1.176-1_all.deb",
        "0d843674607703b9ef8c1db5e715c38ed52ff23574feabfe0d961d552126859f",
        "GPL-2",
        r"/_sources/.*\.rst\.txt$",
        r"/_sources/translations/",
    ),
    Package(
        "python3.11-doc",
        "3.11.2-6+deb12u8",
        "pool/main/p/python3.11/python3.11-doc_3.11.2-6+deb12u8_all.deb",
        "50eb63e7f636c4281e9ce1b8f10386f1def42159eddce34fc1f41c46261df71b",
        "PSF-2.0",
        r"/_sources/.*\.rst\.txt$",
    ),
    Package(
        "llvm-14-doc",
        "1:14.0.6-12",
        "pool/main/l/llvm-toolchain-14/llvm-14-doc_14.0.6-12_all.deb",
        "d83d576ccf39dd9c698f983677f5569284cb4d55f084dd135859a73d31910b1a",
        "Apache-2.0 with LLVM exceptions",
        r"/_sources/.*\.(rst|md)\.txt$",
        r"/AMDGPU",  # tables of instructions
    ),
    Package(
        "perl-doc",
        "5.36.0-7+deb12u3",
        "pool/main/p/perl/perl-doc_5.36.0-7+deb12u3_all.deb",
        "e9e3564ff5ade27de0585835f2acad769bcc545c0a0045a9f55d5401f27f7591",
        "GPL-1+ or Artistic",
        r"/pod/.*\.pod$",
        r"/perl(toc|uniprops)\.pod",
    ),
    Package(
        "vim-runtime",
        "2:9.0.1378-2+deb12u2",
        "pool/main/v/vim/vim-runtime_9.0.1378-2+deb12u2_all.deb",
        "6a3dd2317a593742cb247f3494d986b3127887dbe1449253b8efa6112289854e",
        "Vim",
        r"/vim90/doc/.*\.txt$",
        r"/(version\d|todo)",  # lists of patches
    ),
)

_BOILERPLATE = re.compile(
    r"SPDX-License-Identifier|^\W*Copyright\b|^\W*\(C\) |All rights reserved|-\*-.*-\*-"
    r"|\b(vim?|ex): ?(set? |[a-z]+=|noet|tw)|^=(encoding|cut)\b|^\.\. include:: <",
    re.IGNORECASE,
)


def clean(text: str) -> str:
    """Return a document without licence headers, editors' mode lines, and blank lines in a row."""
    lines = [line.rstrip() for line in text.expandtabs().splitlines() if not _BOILERPLATE.search(line)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")


def archive_members(archive: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of each member of an ``ar`` archive, such as a Debian package.

    Raises:
        InputError: the bytes are no ``ar`` archive.
    """
    if not archive.startswith(b"!<arch>\n"):
        raise InputError(explain("package", archive[:8], "is not the beginning of a Debian package", b"!<arch>\n"))
    position = 8
    while position < len(archive):
        header = archive[position : position + 60]
        size = int(header[48:58])
        yield header[:16].decode().rstrip(" /"), archive[position + 60 : position + 60 + size]
        position += 60 + size + size % 2


def read_documents(package: Package, archive: bytes) -> dict[str, str]:
    """Return the English documents of a package, cleaned, as a dict from path to text."""
    found = {}
    (data,) = (content for name, content in archive_members(archive) if name.startswith("data.tar"))
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar:
            name = member.name.removesuffix(".gz")
            if not re.search(package.documents, name) or re.search(package.excluded, name):
                continue
            file = tar.extractfile(member) if member.isreg() else None
            if file is None:
                continue
            content = file.read()
            content = gzip.decompress(content) if member.name.endswith(".gz") else content
            try:
                text = clean(content.decode())
            except UnicodeDecodeError:  # today's English documentation is UTF-8
                continue
            if sum(not character.isascii() for character in text) <= MOST_FOREIGN * len(text):
                found[name] = text
    return dict(sorted(found.items()))


def without_repeats(documents: Sequence[str]) -> list[str]:
    """Return the documents without the long paragraphs that occurred before.

    Documents that become too short are left out.
    A long paragraph is therefore in one document only. Any split puts it either into training or into validation.
    """
    kept, seen = [], set()
    for document in documents:
        paragraphs = []
        for paragraph in document.split("\n\n"):
            words = " ".join(paragraph.split())
            if len(words) >= SHORTEST_REPEAT:
                if words in seen:
                    continue
                seen.add(words)
            paragraphs.append(paragraph)
        text = "\n\n".join(paragraphs)
        if len(text) >= SHORTEST_DOCUMENT:
            kept.append(text)
    return kept


def split(documents: Sequence[str], validation_bytes: int, seed: int) -> tuple[list[str], list[str]]:
    """Shuffle documents, and return those for training and those for validation.

    Args:
        documents: the documents.
        validation_bytes: bytes of the validation documents, at least.
        seed: seed of the shuffle.

    Raises:
        InputError: no document is left for training.
    """
    shuffled = list(documents)
    random.Random(seed).shuffle(shuffled)
    count = size = 0
    while size < validation_bytes and count < len(shuffled):
        size += len(shuffled[count].encode())
        count += 1
    if count == len(shuffled):
        rule = "leaves no document to train on"
        raise InputError(
            explain("--validation-bytes", validation_bytes, rule, f"less than {size} bytes, the size of all documents")
        )
    return shuffled[count:], shuffled[:count]


def train_tokenizer(documents: Sequence[str], vocabulary: int) -> Any:
    """Return a byte-level BPE tokenizer of at most ``vocabulary`` tokens. Its first token is :data:`END`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # of the extra `transformers`

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def tokenize(tokenizer: Any, documents: Sequence[str]) -> bytes:
    """Return the content of a ``.bin`` file: the tokens of the documents, each document followed by :data:`END`."""
    end = tokenizer.token_to_id(END)
    tokens = array("H")
    for encoded in tokenizer.encode_batch(list(documents)):
        tokens.extend(encoded.ids)
        tokens.append(end)
    return encode_tokens(tokens)


def fetch(package: Package, downloads: Path, mirror: str = MIRROR) -> bytes:
    """Return a package's content from the folder of downloads or from the mirror, and check its hash.

    Raises:
        InputError: the mirror does not have the package, or the file has another hash.
    """
    place = downloads / Path(package.path).name
    if not place.exists():
        address = f"{mirror.rstrip('/')}/{urllib.parse.quote(package.path)}"
        try:
            with urllib.request.urlopen(address, timeout=60) as answer:
                content = answer.read()
        except (urllib.error.URLError, TimeoutError) as error:
            remedy = f"another --mirror, such as a date of snapshot.debian.org, or the package saved as {place}"
            raise InputError(explain(address, error, "cannot be fetched", remedy)) from error
        downloads.mkdir(parents=True, exist_ok=True)
        publish_bytes(place, content)
    content = place.read_bytes()
    if (found := hashlib.sha256(content).hexdigest()) != package.sha256:
        raise InputError(
            explain(f"sha256 of {place}", found, "the file is damaged or another version; remove it", package.sha256)
        )
    return content


def build(
    folder: Path,
    packages: Sequence[Package],
    downloads: Path,
    *,
    mirror: str = MIRROR,
    vocabulary: int = 8192,
    validation_bytes: int = 2_000_000,
    seed: int = 0,
) -> dict[str, Any]:
    """Write a corpus: the tokens of both splits, the tokenizer, and a description.

    Args:
        folder: the folder to write to; made if absent.
        packages: the packages that hold the documents.
        downloads: folder of the packages' files. Absent files are fetched into this folder.
        mirror: address of the mirror that packages are fetched from.
        vocabulary: number of tokens of the tokenizer, at most.
        validation_bytes: bytes of the validation documents, at least.
        seed: seed of the documents' order, and therefore of the split.

    Returns:
        The description.

    Raises:
        InputError: ``vocabulary`` is out of range, or a package cannot be fetched, or no document is left to train on.
    """
    if not 257 <= vocabulary <= LARGEST_VOCABULARY:
        rule = "must hold 256 bytes and the end of a document, and number its tokens with 16 bits"
        raise InputError(explain("vocabulary", vocabulary, rule, f"257..{LARGEST_VOCABULARY}"))
    sources, documents = [], []
    for package in packages:
        texts = list(read_documents(package, fetch(package, downloads, mirror)).values())
        facts = {name: value for name, value in asdict(package).items() if name not in ("documents", "excluded")}
        sources.append(facts | {"documents": len(texts), "bytes": sum(len(text.encode()) for text in texts)})
        documents += texts
    splits = split(without_repeats(documents), validation_bytes, seed)
    tokenizer = train_tokenizer(splits[0], vocabulary)
    about: dict[str, Any] = {"packages": sources, "seed": seed, "vocabulary": tokenizer.get_vocab_size()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, texts in zip((TRAIN, VALIDATION), splits, strict=True):
        content = tokenize(tokenizer, texts)
        publish_bytes(folder / name, content)
        about[name] = {
            "documents": len(texts),
            "bytes": sum(len(text.encode()) for text in texts),
            "tokens": len(content) // 2,
            "sha256": hashlib.sha256(content).hexdigest(),
        }
    publish_bytes(folder / TOKENIZER, tokenizer.to_str().encode())
    publish_json(folder / ABOUT, about)
    return about


def main(
    folder: Annotated[Path, typer.Argument(help="Folder to write the corpus to; created if absent.", file_okay=False)],
    downloads: Annotated[
        Path, typer.Option(help="Folder of package files; missing packages are downloaded to it.", file_okay=False)
    ] = Path("downloads"),
    mirror: Annotated[str, typer.Option(help="URL of the Debian mirror to download from.")] = MIRROR,
    vocabulary: Annotated[int, typer.Option(help="Largest number of tokens of the tokenizer, 257 to 65536.")] = 8192,
    validation_bytes: Annotated[
        int, typer.Option(min=1, help="Smallest size of the validation split, in bytes.")
    ] = 2_000_000,
    seed: Annotated[int, typer.Option(help="Seed of the split into training and validation documents.")] = 0,
) -> None:
    """Fetch Debian packages of documentation, and make a corpus of their text for training and validation."""
    with one_line("corpus"):
        about = build(
            folder,
            PACKAGES,
            downloads,
            mirror=mirror,
            vocabulary=vocabulary,
            validation_bytes=validation_bytes,
            seed=seed,
        )
    table = Table("part", "documents", "bytes", "tokens", "licence")
    for source in about["packages"]:
        table.add_row(source["name"], f"{source['documents']:,}", f"{source['bytes']:,}", "", source["licence"])
    for name in (TRAIN, VALIDATION):
        part = about[name]
        table.add_row(name, f"{part['documents']:,}", f"{part['bytes']:,}", f"{part['tokens']:,}", "")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
