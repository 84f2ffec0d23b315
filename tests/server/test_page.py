"""The page's files, and what browsers are told about them. What it does in a browser: test_browser.py."""

import re
from html.parser import HTMLParser
from importlib.resources import files

import httpx
import pytest

from server.serving import running_server

FOLDER = files("thinfer.server").joinpath("page")


@pytest.fixture(scope="module")
def url(tiny_folder):
    with running_server(tiny_folder, api_key="secret") as url:
        yield url


def page_files(folder=FOLDER, prefix=""):
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from page_files(entry, f"{prefix}{entry.name}/")
        else:
            yield prefix + entry.name


def test_every_file_is_served_without_a_key_and_with_strict_headers(url):
    for name in page_files():
        answer = httpx.get(f"{url}/page/{name}")
        assert answer.status_code == 200, name
        assert answer.headers["x-content-type-options"] == "nosniff"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert httpx.head(f"{url}/page/{name}").content == b""
    assert httpx.get(url + "/").text == FOLDER.joinpath("index.html").read_text()


def test_a_browser_asks_whether_its_copy_is_the_one(url):
    first = httpx.get(url + "/page/app.js")
    again = httpx.get(url + "/page/app.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert first.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize(
    "path", ["/page/", "/page/../page.py", "/page/%2e%2e/page.py", "/page/none.js", "/page/vendor"]
)
def test_nothing_else_is_served(url, path):
    assert httpx.get(url + path).status_code in (401, 404)


def test_the_document_has_no_inline_code_and_nothing_from_elsewhere():
    class Reader(HTMLParser):
        ids, used, labelled = [], [], set()
        inside = None

        def handle_starttag(self, tag, attrs):
            given = dict(attrs)
            assert not any(name.startswith("on") or name == "style" for name in given), given
            self.inside = tag
            self.ids += [given["id"]] if "id" in given else []
            self.used += [given[name] for name in ("src", "href") if name in given]
            self.labelled |= {given[name] for name in ("aria-labelledby", "aria-controls") if name in given}

        def handle_data(self, data):
            assert self.inside not in ("script", "style") or not data.strip()

        def handle_endtag(self, tag):
            self.inside = None

    reader = Reader()
    reader.feed(FOLDER.joinpath("index.html").read_text())
    assert len(reader.ids) == len(set(reader.ids))
    assert reader.labelled <= set(reader.ids)
    names = set(page_files())
    for place in reader.used:
        assert place.removeprefix("/page/") in names or place.removeprefix("#") in reader.ids


def test_scripts_use_ids_that_exist_and_never_parse_html():
    ids = set(re.findall(r'id="([\w-]+)"', FOLDER.joinpath("index.html").read_text()))
    for name in page_files():
        if not name.endswith(".js") or name.startswith("vendor/"):
            continue
        source = FOLDER.joinpath(name).read_text()
        assert set(re.findall(r'find\("([\w-]+)"\)', source)) <= ids, name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", source)
        assert len(source.splitlines()) < 500
        for module in re.findall(r'from "\./([\w-]+\.js)"', source):
            assert FOLDER.joinpath(module).is_file()


def test_the_vendored_library_names_its_version_and_licence():
    assert "uPlot (v1.6.32)" in FOLDER.joinpath("vendor", "uplot.js").read_text()[:100]
    assert "MIT License" in FOLDER.joinpath("vendor", "uplot-LICENSE.txt").read_text()
