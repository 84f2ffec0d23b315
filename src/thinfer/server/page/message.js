// One message as a list item. What people and models wrote goes through textContent only.

import { render } from "./markdown.js";

function button(act, label) {
  const node = document.createElement("button");
  node.type = "button";
  node.className = "link";
  node.dataset.act = act;
  node.textContent = label;
  return node;
}

function block(name, text) {
  const node = document.createElement("div");
  node.className = name;
  if (text !== undefined) node.textContent = text;
  return node;
}

/** The item of a message {role, content, meta, error, pending}. */
export function messageNode(message) {
  const item = document.createElement("li");
  item.className = `message ${message.role}`;
  const who = document.createElement("span");
  who.className = "sr";
  who.textContent = message.role === "user" ? "You" : "Model";
  const foot = block("foot");
  foot.append(block("meta"), block("tools"));
  item.append(who, block("body"), foot);
  updateMessage(item, message);
  return item;
}

/** Bring an item up to date with its message. */
export function updateMessage(item, message) {
  const body = item.querySelector(".body");
  item.classList.toggle("pending", Boolean(message.pending));
  body.setAttribute("aria-busy", String(Boolean(message.pending)));
  if (message.role === "user") {
    body.textContent = message.content;
  } else {
    render(body, message.content);
  }
  item.querySelector(".failure")?.remove();
  if (message.error) {
    const failure = block("failure");
    failure.setAttribute("role", "alert");
    const text = document.createElement("p");
    text.textContent = message.error;
    const again = button("regenerate", "Try again");
    failure.append(text, again);
    body.after(failure);
  }
  const meta = item.querySelector(".meta");
  meta.textContent = message.meta ? describe(message.meta) : "";
  const tools = item.querySelector(".tools");
  tools.replaceChildren();
  if (message.pending) return;
  if (message.content) tools.append(button("copy", "Copy"));
  if (message.role === "user") tools.append(button("edit", "Edit"));
  else if (!message.error) tools.append(button("regenerate", "Regenerate"));
}

/** Replaces the text of a user's item by an editor; resolves to the new text, or null when it is given up. */
export function editMessage(item, message) {
  return new Promise((resolve) => {
    const body = item.querySelector(".body");
    const form = document.createElement("form");
    form.className = "edit";
    const area = document.createElement("textarea");
    area.value = message.content;
    area.setAttribute("aria-label", "Edit message");
    const row = block("row");
    const cancel = button("cancel-edit", "Cancel");
    const save = button("save-edit", "Send");
    save.type = "submit";
    save.className = "primary";
    row.append(cancel, save);
    form.append(area, row);
    item.classList.add("editing");
    body.replaceChildren(form);
    grow(area);
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);

    const end = (text) => {
      item.classList.remove("editing");
      resolve(text);
    };
    area.addEventListener("input", () => grow(area));
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        end(null);
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    cancel.addEventListener("click", () => end(null));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (area.value.trim()) end(area.value);
    });
  });
}

/** Make a text area as high as its text; the style sheet sets the limit. */
export function grow(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}

function describe(meta) {
  const parts = [];
  if (meta.tokens !== undefined) parts.push(`${meta.tokens.toLocaleString("en")} token${meta.tokens === 1 ? "" : "s"}`);
  if (meta.speed) parts.push(`${meta.speed < 10 ? meta.speed.toFixed(1) : Math.round(meta.speed)} tokens/s`);
  if (meta.first !== undefined) parts.push(`first after ${meta.first < 10 ? meta.first.toFixed(2) : Math.round(meta.first)} s`);
  if (meta.cached) parts.push(`${meta.cached.toLocaleString("en")} of the prompt reused`);
  if (meta.reason === "length") parts.push("cut at the token limit");
  if (meta.reason === "stopped") parts.push("stopped");
  return parts.join(" · ");
}
