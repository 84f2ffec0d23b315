// The conversation: its messages, the stream that adds to them, and what stays in the browser.

import { events } from "./api.js";
import { editMessage, messageNode, updateMessage } from "./message.js";
import { recall, remember } from "./store.js";

const STORE = "thinfer.chat";
// Closer to the end than this, new text keeps the end in view.
const NEAR_END = 80;

export class Chat {
  /**
   * @param {object} parts
   * @param {HTMLElement} parts.list where messages go
   * @param {HTMLElement} parts.scroll what scrolls them
   * @param {() => object} parts.request the fields of a request besides its messages
   * @param {() => string} parts.system the system prompt
   * @param {(text: string) => void} parts.announce tells people who do not see the page
   * @param {() => void} parts.changed called when running, messages or usage changed
   */
  constructor({ list, scroll, request, system, announce, changed }) {
    this.list = list;
    this.scroll = scroll;
    this.request = request;
    this.system = system;
    this.announce = announce;
    this.changed = changed;
    this.messages = [];
    this.usage = null;
    this.stopper = null;
    this.frame = 0;
    // Whether the reader follows the end; only the reader's own scrolling changes it.
    this.following = true;
    scroll.addEventListener("scroll", () => this.#scrolled(), { passive: true });
    list.addEventListener("click", (event) => this.#clicked(event));
  }

  get running() {
    return this.stopper !== null;
  }

  /** Show what an earlier visit left. */
  restore() {
    const kept = recall(STORE);
    const messages = Array.isArray(kept?.messages) ? kept.messages : [];
    this.messages = messages.filter((m) => typeof m?.content === "string" && isRole(m.role));
    this.usage = kept?.usage ?? null;
    this.list.replaceChildren(...this.messages.map(messageNode));
    this.toEnd();
    this.changed();
  }

  clear() {
    this.stop();
    this.messages = [];
    this.usage = null;
    this.list.replaceChildren();
    this.following = true;
    this.#keep();
    this.changed();
  }

  async send(text) {
    if (this.running) return;
    this.#add({ role: "user", content: text });
    this.following = true;
    await this.#answer();
  }

  stop() {
    this.stopper?.abort();
  }

  /** Edit the last message of the user. */
  editLast() {
    const place = this.messages.findLastIndex((message) => message.role === "user");
    if (place >= 0) this.#edit(place);
  }

  toEnd() {
    this.following = true;
    this.scroll.scrollTop = this.scroll.scrollHeight;
  }

  #add(message) {
    this.messages.push(message);
    this.list.append(messageNode(message));
    this.changed();
    if (this.following) this.toEnd();
  }

  #cut(length) {
    this.messages.length = length;
    while (this.list.children.length > length) this.list.lastChild.remove();
  }

  async #answer() {
    const messages = this.messages
      .filter((message) => message.content && !message.error)
      .map(({ role, content }) => ({ role, content }));
    const system = this.system().trim();
    if (system) messages.unshift({ role: "system", content: system });
    const message = { role: "assistant", content: "", pending: true };
    this.#add(message);
    const item = this.list.lastChild;
    const stopper = new AbortController();
    this.stopper = stopper;
    this.changed();
    const times = { begin: performance.now(), first: null, last: null };
    let reason = null;
    let usage = null;
    let timings = null;
    let chunks = 0;
    try {
      const body = { ...this.request(), messages, stream: true, stream_options: { include_usage: true } };
      for await (const chunk of events("/v1/chat/completions", { body, signal: stopper.signal })) {
        usage = chunk.usage ?? usage;
        timings = chunk.timings ?? timings;
        const choice = chunk.choices?.[0];
        if (!choice) continue;
        reason = choice.finish_reason ?? reason;
        const text = choice.delta?.content;
        if (!text) continue;
        times.last = performance.now();
        times.first ??= times.last;
        chunks += 1;
        message.content += text;
        this.#show(item, message);
      }
    } catch (error) {
      if (error.name === "AbortError") reason = "stopped";
      else message.error = error.message;
    }
    cancelAnimationFrame(this.frame);
    delete message.pending;
    if (!message.error) message.meta = { ...measured(times, usage, timings, chunks), reason };
    if (this.messages.at(-1) === message) {
      if (usage) this.usage = { prompt: usage.prompt_tokens, answer: usage.completion_tokens };
      this.#update(item, message);
    }
    if (this.stopper === stopper) this.stopper = null;
    this.#keep();
    this.changed();
    this.announce(message.error ? `Failed: ${message.error}` : `Answer ${reason === "stopped" ? "stopped" : "finished"}.`);
  }

  #show(item, message) {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.#update(item, message));
  }

  #update(item, message) {
    updateMessage(item, message);
    if (this.following) this.toEnd();
  }

  #scrolled() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroll;
    this.following = scrollHeight - scrollTop - clientHeight < NEAR_END;
    this.changed();
  }

  async #clicked(event) {
    const target = event.target.closest("button");
    if (!target) return;
    if (target.dataset.copy) {
      await this.#copy(target, target.closest("figure").querySelector("code").textContent);
      return;
    }
    const place = [...this.list.children].indexOf(target.closest("li"));
    const act = target.dataset.act;
    if (act === "copy") await this.#copy(target, this.messages[place].content);
    else if (act === "edit") await this.#edit(place);
    else if (act === "regenerate") await this.#regenerate(place);
  }

  async #copy(target, text) {
    const label = target.textContent;
    try {
      await navigator.clipboard.writeText(text);
      target.textContent = "Copied";
    } catch {
      // Browsers allow the clipboard on secure origins only, which a plain address in the network is not.
      target.textContent = "Select and press Ctrl+C";
    }
    setTimeout(() => {
      target.textContent = label;
    }, 1600);
  }

  async #edit(place) {
    this.stop();
    const item = this.list.children[place];
    const message = this.messages[place];
    const text = await editMessage(item, message);
    if (text === null) {
      updateMessage(item, message);
      return;
    }
    await this.#stopped();
    this.#cut(place);
    await this.send(text);
  }

  async #regenerate(place) {
    this.stop();
    await this.#stopped();
    this.#cut(place);
    this.following = true;
    await this.#answer();
  }

  async #stopped() {
    while (this.running) await new Promise((resolve) => setTimeout(resolve, 10));
  }

  #keep() {
    const messages = this.messages.filter((message) => !message.error && !message.pending);
    remember(STORE, { messages, usage: this.usage });
  }
}

function isRole(role) {
  return role === "user" || role === "assistant";
}

/** Counts and speed of an answer: the server's where it sent them, else what was seen here. */
function measured(times, usage, timings, chunks) {
  const tokens = usage?.completion_tokens ?? (chunks || undefined);
  const seconds = times.last !== null ? (times.last - times.first) / 1000 : 0;
  const seen = seconds > 0.05 && tokens > 1 ? (tokens - 1) / seconds : null;
  return {
    tokens,
    speed: timings?.decode_tokens_per_second ?? timings?.predicted_per_second ?? seen,
    first: times.first !== null ? (times.first - times.begin) / 1000 : undefined,
    cached: usage?.prompt_tokens_details?.cached_tokens,
  };
}
