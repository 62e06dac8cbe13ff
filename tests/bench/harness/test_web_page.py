"""Result files as a web page: everything is in the file, and what a file holds is text and not markup."""

import dataclasses
from html.parser import HTMLParser

from fuseopt.bench.harness.records import Record
from fuseopt.cli import main
from tests.bench.harness.test_plot import RESULTS


class Page(HTMLParser):
    """Start tags with their attributes, and the text, of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.words.append(data)


def test_several_files_are_one_page_that_needs_nothing_else(capsys, tmp_path):
    RESULTS.save(tmp_path / "a.json")
    rows = (Record("<script>alert(1)</script>", "stock", (0.1, 0.2, 0.3), note="1 < 2"),)
    dataclasses.replace(RESULTS, benchmark="train", rows=rows).save(tmp_path / "b.json")
    page = tmp_path / "page.html"
    assert main(["bench", "show", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--html", str(page)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("a processor, 2 threads; ") == 2 and printed.endswith(f"written to {page}\n")

    read = Page(page.read_text(encoding="utf-8"))
    tags = [tag for tag, _ in read.tags]
    assert not {"script", "link", "img", "iframe"} & set(tags) and tags.count("table") == 2
    assert not any("src" in attributes or "href" in attributes for _, attributes in read.tags)
    assert "url(" not in page.read_text() and "@import" not in page.read_text()
    for words in ("generate", "train", "35.00x, 130 us", "<script>alert(1)</script>", "1 < 2", "cannot"):
        assert words in read.words, words
    widths = [attributes["style"] for tag, attributes in read.tags if tag == "i"]
    assert widths == ["width:2.86%", "width:100.00%", "width:2.86%", "width:1.43%", "width:100.00%"]


def test_one_plot_is_of_one_file(capsys, tmp_path):
    RESULTS.save(tmp_path / "a.json")
    files = [str(tmp_path / "a.json")] * 2
    assert main(["bench", "show", *files, "--plot", str(tmp_path / "a.svg")]) == 2
    assert "--plot draws one result file" in capsys.readouterr().err
