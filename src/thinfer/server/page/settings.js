// Sampling settings and the system prompt, kept in the browser. What is empty is not sent: the model's own value acts.

import { recall, remember } from "./store.js";

const STORE = "thinfer.settings";

const FIELDS = [
  { name: "temperature", label: "Temperature", hint: "0 always takes the likeliest", min: 0, max: 2, step: 0.05, slider: true },
  { name: "top_p", label: "Top p", hint: "share of probability kept", min: 0.01, max: 1, step: 0.01, slider: true },
  { name: "top_k", label: "Top k", hint: "0 keeps all", min: 0, max: 1000, step: 1 },
  { name: "min_p", label: "Min p", hint: "against the likeliest", min: 0, max: 1, step: 0.01 },
  { name: "repetition_penalty", label: "Repetition penalty", hint: "1 is none", min: 0.5, max: 2, step: 0.05 },
  { name: "max_tokens", label: "Most tokens", hint: "of an answer", min: 1, max: 1000000, step: 1 },
  { name: "seed", label: "Seed", hint: "for the same answer again", min: 0, max: 4294967295, step: 1 },
];

export class Settings {
  constructor(dialog) {
    this.dialog = dialog;
    this.form = dialog.querySelector("form");
    const fields = dialog.querySelector("#fields");
    for (const field of FIELDS) fields.append(fieldNode(field));
    this.#load();
    this.form.addEventListener("input", (event) => this.#input(event.target));
    dialog.querySelector("#reset-settings").addEventListener("click", () => {
      this.form.reset();
      for (const { name } of FIELDS) this.#paint(name);
      this.#keep();
    });
    dialog.addEventListener("click", (event) => {
      if (event.target === dialog) dialog.close();
    });
  }

  open() {
    this.dialog.showModal();
  }

  get system() {
    return this.form.elements.system.value;
  }

  /** The fields of a request that are set. */
  request() {
    const body = {};
    for (const { name } of FIELDS) {
      const input = this.form.elements[name];
      if (input.value !== "" && input.validity.valid) body[name] = Number(input.value);
    }
    if (this.form.elements.stop.value) body.stop = [this.form.elements.stop.value];
    return body;
  }

  #input(target) {
    if (target.dataset.slides) this.form.elements[target.dataset.slides].value = target.value;
    this.#paint(target.dataset.slides ?? target.name);
    this.#keep();
  }

  /** Move a slider to where its number is. */
  #paint(name) {
    const slider = this.form.querySelector(`[data-slides="${name}"]`);
    const input = this.form.elements[name];
    if (!slider) return;
    slider.value = input.value === "" ? 1 : input.value;
    slider.classList.toggle("unset", input.value === "");
  }

  #load() {
    const kept = recall(STORE) ?? {};
    for (const name of ["system", "stop", ...FIELDS.map((field) => field.name)]) {
      if (typeof kept[name] === "string") this.form.elements[name].value = kept[name];
      this.#paint(name);
    }
  }

  #keep() {
    const names = ["system", "stop", ...FIELDS.map((field) => field.name)];
    remember(STORE, Object.fromEntries(names.map((name) => [name, this.form.elements[name].value])));
  }
}

function fieldNode({ name, label, hint, min, max, step, slider }) {
  const node = document.createElement("label");
  const title = document.createElement("span");
  title.textContent = label;
  const aside = document.createElement("small");
  aside.textContent = hint;
  title.append(" ", aside);
  const row = document.createElement("span");
  row.className = "row";
  const input = document.createElement("input");
  // Only a slider moves in steps: any fraction may be typed.
  const typed = step === 1 ? 1 : "any";
  Object.assign(input, { type: "number", name, min, max, step: typed, placeholder: "model’s own", inputMode: "decimal" });
  // A label names what it is for; without that the first field inside it, which may be the slider.
  input.id = `set-${name}`;
  node.htmlFor = input.id;
  if (slider) {
    const range = document.createElement("input");
    Object.assign(range, { type: "range", min, max, step });
    range.dataset.slides = name;
    range.setAttribute("aria-label", `${label}, slider`);
    row.append(range);
  }
  row.append(input);
  node.append(title, row);
  return node;
}
