"""Sources of the training text: Debian packages with their licences.

All texts may be used, changed and shipped without conditions on the result: public domain,
PostgreSQL, PSF, BSD, MIT, Apache-2.0 and WordNet terms. Packages under GPL, GFDL, MPL or CC-BY-SA
are deliberately not used (among them dict-gcide, dict-foldoc, linux-doc).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """One Debian package and the text read from it.

    Attributes:
        version: Version on which the shipped model was trained; the archive may have a newer one.
        reader: Key of training.readers.READERS.
        root: Folder or file inside the unpacked package.
        glob: Files below ``root``.
        weight: How often one pass over the corpus repeats the text.
    """

    package: str
    version: str
    licence: str
    title: str
    reader: str
    root: str
    glob: str = "**/*.html"
    weight: int = 1


_RUST = "usr/share/doc/rust-doc/html"
_RUST_BOOKS = ("book", "reference", "nomicon", "rustc", "rustdoc", "embedded-book",
               "rust-by-example", "edition-guide", "std")  # fmt: skip

_LZ4 = "usr/share/gocode/src/github.com/pierrec/lz4/testdata"

SOURCES: tuple[Source, ...] = (
    Source(
        "r-cran-janeaustenr", "1.0.0-1", "public domain", "Jane Austen's six novels", "austen",
        "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb", weight=3,
    ),
    Source(
        "sword-text-web", "426.0-1", "public domain", "World English Bible", "sword",
        "usr/share/sword/modules/texts/ztext/engWEB2015eb",
    ),
    Source(
        "golang-github-andybalholm-brotli-dev", "1.0.4-3", "public domain",
        "Isaac Newton, Opticks (test data of the package)", "plain",
        "usr/share/gocode/src/github.com/andybalholm/brotli/testdata/Isaac.Newton-Opticks.txt",
    ),
    Source(
        "dict-devil", "1.0-13.1", "public domain", "Ambrose Bierce, The Devil's Dictionary",
        "plain", "usr/share/dictd/devil.dict.dz", weight=2,
    ),
    Source(
        "dict-jargon", "4.4.7-3.1", "public domain", "The Jargon File", "plain",
        "usr/share/dictd/jargon.dict.dz", weight=2,
    ),
    Source(
        "sqlite3-doc", "3.40.1-2+deb12u2", "public domain", "SQLite documentation", "html",
        "usr/share/doc/sqlite3",
    ),
    Source(
        "postgresql-doc-15", "15.20-0+deb12u1", "PostgreSQL", "PostgreSQL documentation", "html",
        "usr/share/doc/postgresql-doc-15/html",
    ),
    Source(
        "python3.11-doc", "3.11.2-6+deb12u9", "PSF-2.0", "Python documentation", "html",
        "usr/share/doc/python3.11/html",
    ),
    Source(
        "python-django-doc", "3:3.2.25-0+deb12u7", "BSD-3-Clause", "Django documentation", "html",
        "usr/share/doc/python-django-doc/html",
    ),
    Source(
        "python-flask-doc", "2.2.2-3", "BSD-3-Clause", "Flask documentation", "html",
        "usr/share/doc/python-flask-doc/html",
    ),
    Source(
        "python-sqlalchemy-doc", "1.4.46+ds1-1", "MIT", "SQLAlchemy documentation", "html",
        "usr/share/doc/python-sqlalchemy-doc",
    ),
    Source(
        "sphinx-doc", "5.3.0-4", "BSD-2-Clause", "Sphinx documentation", "html",
        "usr/share/doc/sphinx-doc/html",
    ),
    Source(
        "cmake-doc", "3.25.1-1", "BSD-3-Clause", "CMake documentation", "html",
        "usr/share/doc/cmake-data/html",
    ),
    Source(
        "apache2-doc", "2.4.71-1~deb12u1", "Apache-2.0", "Apache HTTP server manual", "html",
        "usr/share/doc/apache2-doc/manual/en",
    ),
    Source(
        "erlang-doc", "1:25.2.3+dfsg-1+deb12u4", "Apache-2.0", "Erlang/OTP documentation", "html",
        "usr/share/doc/erlang-doc",
    ),
    Source(
        "nodejs-doc", "18.20.4+dfsg-1~deb12u3", "MIT", "Node.js documentation", "html",
        "usr/share/doc/nodejs",
    ),
    Source(
        "llvm-14-doc", "1:14.0.6-12", "Apache-2.0 with LLVM exception", "LLVM documentation",
        "html", "usr/share/doc/llvm-14-doc/html",
    ),
    Source(
        "neutron-doc", "2:21.0.0-7+deb12u1", "Apache-2.0", "OpenStack Neutron documentation",
        "html", "usr/share/doc/neutron-doc/html",
    ),
    Source(
        "nova-doc", "2:26.2.2-1~deb12u5", "Apache-2.0", "OpenStack Nova documentation", "html",
        "usr/share/doc/nova-doc/html",
    ),
    Source(
        "python-pandas-doc", "1.5.3+dfsg-2", "BSD-3-Clause", "pandas documentation", "html",
        "usr/share/doc/python-pandas-doc/html",
    ),
    *(
        Source(
            "rust-doc", "1.63.0+dfsg1-2", "MIT or Apache-2.0", f"Rust documentation: {book}",
            "html", f"{_RUST}/{book}",
        )
        for book in _RUST_BOOKS
    ),
)  # fmt: skip

FRESH: tuple[Source, ...] = (
    Source(
        "golang-github-pierrec-lz4-dev", "2.5.2-2", "public domain",
        "Arthur Conan Doyle, The Adventures of Sherlock Holmes (test data of the package)",
        "gutenberg", f"{_LZ4}/pg1661.txt", weight=2,
    ),
    Source(
        "golang-github-pierrec-lz4-dev", "2.5.2-2", "public domain",
        "Mark Twain, The Adventures of Tom Sawyer (test data of the package)",
        "gutenberg", f"{_LZ4}/Mark.Twain-Tom.Sawyer.txt", weight=2,
    ),
    Source(
        "sword-comm-mhcc", "2.0-1", "public domain", "Matthew Henry's Concise Commentary", "sword",
        "usr/share/sword/modules/comments/zcom/mhcc",
    ),
    Source(
        "tomcat10-docs", "10.1.60-1~deb12u1", "Apache-2.0", "Apache Tomcat documentation", "html",
        "usr/share/tomcat10-docs/docs",
    ),
    Source(
        "swift-doc", "2.30.1-0+deb12u3", "Apache-2.0", "OpenStack Swift documentation", "html",
        "usr/share/doc/swift-doc",
    ),
    Source(
        "python-tornado-doc", "6.2.0-3+deb12u4", "Apache-2.0", "Tornado documentation", "html",
        "usr/share/doc/python-tornado-doc/html", "[a-z]*/*.html",
    ),
)  # fmt: skip
"""Additional prose for the second training (training/finetune.py)."""

WORDNET = Source(
    "wordnet-base", "1:3.0-37", "WordNet 3.0", "WordNet: definitions, examples, relations",
    "wordnet", "usr/share/wordnet",
)  # fmt: skip
