// Puts the page together: health and model, the composer, keys, theme and panels.

import { getJson, onKeyNeeded, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { LiveView } from "./live.js";
import { grow } from "./message.js";
import { Settings } from "./settings.js";
import { recall, remember } from "./store.js";

const IDEAS = [
  ["Explain", "Explain in three short paragraphs why most weights of a language model hardly matter for one token."],
  ["Write code", "Write a Python function that merges two sorted lists, with a short example."],
  ["Compare", "Make a small table that compares a bicycle, a tram and a car for a trip of five kilometres."],
];
const HEALTH_SECONDS = 1.5;

const find = (id) => document.getElementById(id);
const phone = window.matchMedia("(max-width: 900px)");

const settings = new Settings(find("settings"));
const state = { model: null, ready: false, context: null, theme: "auto" };

const chat = new Chat({
  list: find("messages"),
  scroll: find("scroll"),
  request: () => ({ model: state.model, ...settings.request() }),
  system: () => settings.system,
  announce: (text) => {
    find("announce").textContent = text;
  },
  changed: () => showState(),
});

const live = new LiveView((model) => {
  state.context = model.context;
  showState();
});

// ---- the composer

const draft = find("draft");

function showState() {
  const empty = chat.messages.length === 0;
  find("welcome").hidden = !empty;
  find("send").hidden = chat.running;
  find("stop").hidden = !chat.running;
  find("send").disabled = !state.ready || !draft.value.trim();
  find("latest").hidden = chat.following || empty;
  showCount();
}

let draftTokens = 0;
let counting = 0;

function showCount() {
  const used = chat.usage ? chat.usage.prompt + chat.usage.answer : 0;
  const parts = [];
  if (used && chat.messages.length) {
    const of = state.context ? ` of ${state.context.toLocaleString("en")}` : "";
    parts.push(`${used.toLocaleString("en")}${of} tokens`);
  }
  if (draftTokens) parts.push(`draft ${draftTokens.toLocaleString("en")}`);
  find("count").textContent = parts.join(" · ");
}

function countDraft() {
  clearTimeout(counting);
  const text = draft.value;
  if (!text.trim() || !state.ready) {
    draftTokens = 0;
    showCount();
    return;
  }
  counting = setTimeout(async () => {
    try {
      const body = { model: state.model, prompt: text, add_special_tokens: false };
      const { count } = await getJson("/tokenize", body);
      if (draft.value === text) draftTokens = count;
    } catch {
      draftTokens = 0;
    }
    showCount();
  }, 350);
}

function submit(text) {
  if (!text.trim() || !state.ready || chat.running) return;
  draft.value = "";
  draftTokens = 0;
  grow(draft);
  chat.send(text.trim());
}

draft.addEventListener("input", () => {
  grow(draft);
  countDraft();
  showState();
});
draft.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit(draft.value);
  } else if (event.key === "ArrowUp" && !draft.value) {
    event.preventDefault();
    chat.editLast();
  }
});
find("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit(draft.value);
});
find("stop").addEventListener("click", () => {
  chat.stop();
  draft.focus();
});
find("latest").addEventListener("click", () => {
  chat.toEnd();
  showState();
});
find("new-chat").addEventListener("click", () => {
  chat.clear();
  draft.focus();
});
find("open-settings").addEventListener("click", () => settings.open());

for (const [name, text] of IDEAS) {
  const idea = document.createElement("button");
  idea.type = "button";
  const title = document.createElement("b");
  title.textContent = name;
  idea.append(title, text);
  idea.addEventListener("click", () => submit(text));
  find("ideas").append(idea);
}

// ---- keys

document.addEventListener("keydown", (event) => {
  const writing = event.target.closest?.("input, textarea, select, dialog");
  if (event.key === "/" && !writing && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    draft.focus();
  } else if (event.key === "Escape" && !event.target.closest?.("dialog")) {
    if (chat.running) chat.stop();
    else if (phone.matches) showLive(false);
  }
});

// ---- theme and panels

const THEMES = ["auto", "light", "dark"];
const dark = window.matchMedia("(prefers-color-scheme: dark)");

function showTheme(choice) {
  state.theme = choice;
  document.documentElement.dataset.theme = choice === "auto" ? (dark.matches ? "dark" : "light") : choice;
  find("theme").title = `Theme: ${choice}`;
  find("theme").setAttribute("aria-label", `Theme: ${choice}; press to change`);
  live.retheme();
}

find("theme").addEventListener("click", () => {
  const choice = THEMES[(THEMES.indexOf(state.theme) + 1) % THEMES.length];
  remember("thinfer.theme", choice);
  showTheme(choice);
});
dark.addEventListener("change", () => showTheme(state.theme));

function showLive(open) {
  document.body.classList.toggle("with-live", open);
  find("toggle-live").setAttribute("aria-expanded", String(open));
  find("toggle-live").setAttribute("aria-label", open ? "Hide the live view" : "Show the live view");
  // A panel over the chat takes the focus, and gives it back.
  if (phone.matches && open) find("close-live").focus();
}

find("toggle-live").addEventListener("click", () => showLive(!document.body.classList.contains("with-live")));
find("close-live").addEventListener("click", () => {
  showLive(false);
  find("toggle-live").focus();
});
find("ticker").addEventListener("click", () => showLive(true));
phone.addEventListener("change", () => showLive(!phone.matches));

// ---- the server

onKeyNeeded(
  (wrong) =>
    new Promise((resolve) => {
      const dialog = find("key-dialog");
      const form = find("key-form");
      if (wrong) find("key-help").textContent = "The server does not take this key. Try another.";
      form.elements.key.value = "";
      dialog.onclose = () => {
        const key = form.elements.key.value;
        if (key) setKey(key);
        resolve(Boolean(key));
      };
      dialog.showModal();
    }),
);

function showModel(name, health) {
  find("model-name").textContent = name;
  find("dot").dataset.state = health;
}

async function isHealthy() {
  try {
    return (await fetch("/health", { cache: "no-store" })).ok ? "ready" : "loading";
  } catch {
    return "gone";
  }
}

/** Waits for the server, asks for its model, and starts the live view. */
async function connect() {
  for (;;) {
    const health = await isHealthy();
    if (health === "ready") break;
    showModel(health === "loading" ? "loading the model…" : "no server", health);
    await new Promise((resolve) => setTimeout(resolve, 1000 * HEALTH_SECONDS));
  }
  try {
    const [model] = (await getJson("/v1/models")).data;
    state.model = model.id;
    state.context = model.max_model_len ?? state.context;
    state.ready = true;
    showModel(model.id, "ready");
    find("welcome-model").textContent = model.id;
    document.title = `${model.id} · thinfer`;
    live.start();
  } catch (error) {
    showModel(error.message, "gone");
  }
  showState();
}

showTheme(THEMES.includes(recall("thinfer.theme")) ? recall("thinfer.theme") : "auto");
showLive(!phone.matches);
chat.restore();
if (!phone.matches) draft.focus();
connect();
