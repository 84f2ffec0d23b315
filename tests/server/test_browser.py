"""The page in a real browser: chat, keys, settings, the live view, hostile answers, and small screens."""

import json
import re
from contextlib import ExitStack

import pytest

from server.browsing import PHONE, answer, chromium, opened, paced_server, picture, settings

pytestmark = pytest.mark.slow

HOSTILE = """<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>

[click](javascript:window.hacked=1) [data](data:text/html,<script>window.hacked=1</script>)
[fine](https://example.org/a?b=1)

<a href="javascript:window.hacked=1">x</a> **<b onmouseover=window.hacked=1>bold</b>** `<i>code</i>`
JAVASCRIPT:window.hacked=1

```html"><img src=x onerror=window.hacked=1>
<script>window.hacked=1</script>
```

| <img src=x onerror=window.hacked=1> | b |
|---|---|
| [y](vbscript:x) | <svg onload=window.hacked=1> |
"""
RICH = """## Title

Some *soft* and **strong** text with `code`, snake_case_name and 2 * 3 * 4.

1. first
2. second
   - inner

> quoted

```python
print("<hello>")
```

| a | b |
|---|---|
| 1 | 2 |
"""


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def server(tiny_folder):
    with paced_server(tiny_folder) as server:
        yield server


@pytest.fixture
def page(browser, server):
    with opened(browser, server.url) as page:
        yield page
    server.pace = 0.0


@pytest.fixture
def mocked(browser, server):
    """A page whose answers are what the test says: `answers` are texts, or (status, message)."""
    with opened(browser, server.url, expected=("Failed to load resource",)) as page:
        page.answers, page.bodies = [], []

        def reply(route):
            page.bodies.append(route.request.post_data_json)
            given = page.answers.pop(0)
            if isinstance(given, tuple):
                status, message = given
                route.fulfill(status=status, json={"error": {"message": message, "type": "x", "code": "x"}})
                return
            pieces = [given[i : i + 7] for i in range(0, len(given), 7)]
            chunks = [{"choices": [{"delta": {"content": piece}, "finish_reason": None}]} for piece in pieces]
            chunks.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
            chunks.append({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": len(pieces)}})
            events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
            route.fulfill(
                status=200, content_type="text/event-stream", body="".join([*events, ": ping\n\n", "data: [DONE]\n\n"])
            )

        page.route("**/v1/chat/completions", reply)
        yield page


def ask(page, text):
    page.fill("#draft", text)
    page.keyboard.press("Enter")


def test_a_chat_from_the_first_word_to_the_figures(page, server):
    server.pace = 0.02
    settings(page, temperature=0, max_tokens=40)
    assert page.locator("#welcome").is_visible()
    ask(page, "hello there")
    page.locator(".message.assistant.pending").wait_for()
    first = answer(page)
    assert page.locator(".message.user .body").inner_text() == "hello there"
    assert re.search(r"\d+ tokens? · .* tokens/s · first after", first.locator(".meta").inner_text())
    assert page.locator("#welcome").is_hidden()
    assert re.fullmatch(r"[\d,]+ of 512 tokens", page.locator("#count").inner_text())
    assert page.locator("#announce").inner_text() == "Answer finished."
    assert page.evaluate("document.activeElement.id") == "draft"
    # The live view saw the same.
    page.locator("#live[data-state=idle]").wait_for()
    assert float(page.locator("#speed").inner_text()) > 0
    assert re.fullmatch(r"\d+ % on average", page.locator("#density").inner_text())
    assert page.locator("#kinds dd span").count() == 4
    assert "most" in page.locator("#heat").get_attribute("aria-label")
    picture(page, "desktop-light")
    page.emulate_media(color_scheme="dark")
    page.wait_for_timeout(300)
    picture(page, "desktop-dark")


def test_what_predictors_find_is_said_where_there_are_any(mocked):
    frame = {"at": 1, "seconds": 1, "steps": 9, "rows": 9, "tokens": 9, "density": 0.557, "layers": [0.5, 0.6]}
    frame |= {"kinds": {}, "bytes": 6, "dense_bytes": 9}
    now = {"running": 1, "waiting": 0, "kv_used": 0, "kv_cached": 0, "preemptions": 0}
    model = {"type": "llama", "layers": 2, "context": 512, "kv_tokens": 512, "max_sequences": 1, "sparse": None}
    recalls = [None, 0.9594]

    def live(route):
        event = {"model": model, "frames": [frame], "now": now | {"recall": recalls[0]}}
        route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(event)}\n\n")

    mocked.route("**/v1/live", live)
    for text in ("", "Predictors find 95.9 % of the neurons that fire."):
        mocked.reload()
        mocked.locator("#density", has_text="56 % on average").wait_for()
        assert mocked.locator("#recall").is_visible() == bool(text)
        assert not text or mocked.locator("#recall").inner_text() == text
        # It has no thresholds and is not dense.
        assert mocked.locator("#live-note").is_hidden()
        recalls.pop(0)
    picture(mocked, "recall")


def test_the_heat_strip_is_drawn_and_says_what_is_under_the_pointer(page, server):
    server.pace = 0.02
    settings(page, temperature=0, max_tokens=30)
    ask(page, "a")
    answer(page)
    page.locator("#live[data-state=idle]").wait_for()
    colours = page.evaluate(
        """() => {
          const canvas = document.getElementById("heat");
          const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
          const seen = new Set();
          for (let i = 0; i < data.length; i += 4) if (data[i + 3]) seen.add(data.slice(i, i + 3).join());
          return seen.size;
        }"""
    )
    assert colours >= 3
    box = page.locator("#heat").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 6, box["y"] + 3)
    assert re.fullmatch(r"layer 0: \d+ % · \d+ tokens?(, prompt)?", page.locator("#heat-tip").inner_text())


def test_escape_stops_and_the_text_stays(page, server):
    server.pace = 0.05
    settings(page, temperature=0, max_tokens=400)
    ask(page, "hello there")
    page.locator(".message.assistant.pending .body:not(:empty)").wait_for()
    page.keyboard.press("Escape")
    stopped = answer(page)
    assert "stopped" in stopped.locator(".meta").inner_text()
    assert stopped.locator(".body").inner_text().strip()
    # The server has let go of it too.
    server.pace = 0.0
    page.locator("#live[data-state=idle]").wait_for()
    page.locator("#send").wait_for()


def test_regenerate_repeats_and_an_edit_replaces_what_followed(page, server):
    settings(page, temperature=0, max_tokens=12)
    ask(page, "one")
    text = answer(page).locator(".body").inner_text()
    ask(page, "two")
    answer(page, 2)
    page.locator(".message.assistant").first.hover()
    page.locator(".message.assistant").first.get_by_role("button", name="Regenerate").click()
    assert answer(page).locator(".body").inner_text() == text
    assert page.locator(".message").count() == 2
    page.locator(".message.user").hover()
    page.locator(".message.user").get_by_role("button", name="Edit").click()
    assert page.locator(".edit textarea").input_value() == "one"
    page.keyboard.press("Escape")
    assert page.locator(".message.user .body").inner_text() == "one"
    page.fill("#draft", "")
    page.focus("#draft")
    page.keyboard.press("ArrowUp")
    page.fill(".edit textarea", "three")
    page.keyboard.press("Enter")
    page.locator(".message.user .body", has_text="three").wait_for()
    answer(page)
    assert page.locator(".message").count() == 2
    # What was said stays over a reload, and goes with a new chat.
    page.reload()
    assert page.locator(".message.user .body").inner_text() == "three"
    page.click("#new-chat")
    page.reload()
    assert page.locator(".message").count() == 0


def test_keys(page):
    page.locator("#scroll").focus()
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "draft"
    page.keyboard.type("a/b")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("c")
    assert page.locator("#draft").input_value() == "a/b\nc"
    assert page.locator(".message").count() == 0
    page.locator("#count", has_text="draft 5").wait_for()


def test_only_what_is_set_is_sent(mocked):
    mocked.answers = ["fine", "fine"]
    ask(mocked, "x")
    answer(mocked)
    body = mocked.bodies[0]
    assert set(body) == {"model", "messages", "stream", "stream_options"}
    assert body["messages"] == [{"role": "user", "content": "x"}]
    settings(mocked, system="Be brief.", temperature=0.25, top_k=40, seed=7, max_tokens=5, stop="END")
    mocked.reload()
    mocked.locator("#dot[data-state=ready]").wait_for()
    ask(mocked, "y")
    answer(mocked, 2)
    body = mocked.bodies[1]
    given = {name: body[name] for name in ("temperature", "top_k", "seed", "max_tokens", "stop")}
    assert given == {"temperature": 0.25, "top_k": 40, "seed": 7, "max_tokens": 5, "stop": ["END"]}
    assert "top_p" not in body
    assert [message["role"] for message in body["messages"]] == ["system", "user", "assistant", "user"]


def test_a_hostile_answer_stays_text(mocked):
    mocked.answers = [HOSTILE]
    ask(mocked, "<img src=x onerror=window.hacked=1>")
    body = answer(mocked).locator(".body")
    mocked.wait_for_timeout(200)
    assert mocked.evaluate("window.hacked") is None
    assert body.locator("img, script, svg, i, b").count() == 0
    hrefs = body.locator("a").evaluate_all("links => links.map(link => link.href)")
    assert hrefs == ["https://example.org/a?b=1"]
    assert body.locator("a").get_attribute("rel") == "noopener noreferrer"
    assert "<script>window.hacked=1</script>" in body.inner_text()
    assert mocked.locator(".message.user .body").inner_text() == "<img src=x onerror=window.hacked=1>"


def test_markdown_becomes_structure(mocked):
    mocked.answers = [RICH]
    ask(mocked, "x")
    body = answer(mocked).locator(".body")
    assert body.locator("h4").inner_text() == "Title"
    assert body.locator("strong").inner_text() == "strong"
    assert body.locator("em").all_inner_texts() == ["soft"]
    assert body.locator("ol > li").count() == 2
    assert body.locator("ol > li ul > li").inner_text() == "inner"
    assert body.locator("blockquote").inner_text() == "quoted"
    assert body.locator("pre code").inner_text() == 'print("<hello>")'
    assert body.locator("figcaption span").inner_text() == "python"
    assert body.locator("td").all_inner_texts() == ["1", "2"]
    picture(mocked, "markdown-light")


def test_a_long_answer_is_rendered_quickly(mocked):
    """Text made to be hard for patterns takes no longer than a reader notices."""
    for hard in ("**" * 4000, "`" * 6000, "[" * 6000, "_a" * 4000, "> " * 3000, "|" * 6000, "- " * 3000):
        seconds = mocked.evaluate(
            """async (text) => {
              const { render } = await import("/page/markdown.js");
              const begin = performance.now();
              render(document.createElement("div"), text);
              return (performance.now() - begin) / 1000;
            }""",
            hard,
        )
        assert seconds < 2, hard[:4]


def test_a_failure_is_said_and_can_be_tried_again(mocked):
    mocked.answers = [(429, "3 requests wait; try again later"), "now it works"]
    ask(mocked, "x")
    failure = mocked.locator(".failure")
    failure.wait_for()
    assert "3 requests wait" in failure.inner_text()
    failure.get_by_role("button", name="Try again").click()
    mocked.locator(".message.assistant .body", has_text="now it works").wait_for()
    assert mocked.locator(".failure").count() == 0
    assert mocked.bodies[0] == mocked.bodies[1]


def test_a_prompt_that_is_too_long_is_refused_in_the_servers_words(browser, server):
    with opened(browser, server.url, expected=("status of 400",)) as page:
        ask(page, "word " * 300)
        page.locator(".failure").wait_for()
        assert "512" in page.locator(".failure").inner_text()


def test_the_key_is_asked_for_and_kept(browser, tiny_folder):
    with (
        paced_server(tiny_folder, api_key="secret") as server,
        opened(browser, server.url, ready=False, expected=("status of 401",)) as page,
    ):
        page.locator("#key-dialog[open]").wait_for()
        page.fill("[name=key]", "wrong")
        page.keyboard.press("Enter")
        page.get_by_text("does not take this key").wait_for()
        page.fill("[name=key]", "secret")
        page.keyboard.press("Enter")
        page.locator("#dot[data-state=ready]").wait_for()
        page.reload()
        page.locator("#dot[data-state=ready]").wait_for()
        page.locator("#live[data-state=idle]").wait_for()


def test_a_loading_server_is_waited_for(browser, server):
    with opened(browser, server.url, ready=False, expected=("status of 503",)) as page:
        page.route("**/health", lambda route: route.fulfill(status=503, json={"error": {"message": "loading"}}))
        page.reload()
        page.get_by_text("loading the model").wait_for()
        assert page.locator("#send").is_disabled()
        page.unroute("**/health")
        page.locator("#dot[data-state=ready]").wait_for()


def test_themes(page):
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(colour)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"{colour} != '{light}'")
    dark = page.evaluate(colour)
    page.click("#theme")
    assert page.evaluate(colour) == light
    page.reload()
    assert page.evaluate(colour) == light
    page.click("#theme")
    assert page.evaluate(colour) == dark


def test_everything_to_press_has_a_name(page):
    page.click("#open-settings")
    for role in ("button", "textbox", "spinbutton", "slider", "meter", "img", "dialog"):
        for node in page.get_by_role(role).all():
            text = node.evaluate(
                "n => (n.labels?.[0]?.innerText || n.ariaLabel || n.title || n.innerText || '').trim()"
                " || document.getElementById(n.getAttribute('aria-labelledby'))?.innerText"
            )
            assert text, node.evaluate("n => n.outerHTML")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone(browser, server, scheme):
    phone = {"viewport": PHONE, "is_mobile": True, "has_touch": True, "color_scheme": scheme}
    with opened(browser, server.url, **phone) as page:
        server.pace = 0.02
        settings(page, temperature=0, max_tokens=30)
        assert page.locator("#live").is_hidden()
        page.fill("#draft", "hello")
        page.tap("#send")
        answer(page)
        assert "tokens/s" in page.locator("#ticker").inner_text()
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        picture(page, f"phone-{scheme}")
        page.tap("#ticker")
        assert page.locator("#live").is_visible()
        picture(page, f"phone-live-{scheme}")
        page.tap("#close-live")
        assert page.locator("#live").is_hidden()
        for control in page.locator(".top button, #send").all():
            box = control.bounding_box()
            assert min(box["width"], box["height"]) >= 35
        server.pace = 0.0


def test_a_server_that_went_is_said(browser, tiny_folder):
    with ExitStack() as visit:
        with paced_server(tiny_folder) as server:
            page = visit.enter_context(opened(browser, server.url, expected=("ERR_",)))
            page.locator("#live[data-state=idle]").wait_for()
        page.locator("#live[data-state=off]").wait_for()
        ask(page, "x")
        page.locator(".failure").wait_for()
        assert "does not answer" in page.locator(".failure").inner_text()
