// The heat strip: a row a layer, a column a moment, the newest at the right; full ink where every weight was read.

const CELL = 5;
const GAP = 1;
const LANE = 4;
const HEIGHT = 170;
const SHADES = 32;

export class HeatStrip {
  /** `scaled(low, high)` is called with the fractions that the two ends of the colours stand for. */
  constructor(canvas, tip, scaled) {
    this.canvas = canvas;
    this.tip = tip;
    this.scaled = scaled;
    this.frames = [];
    this.layers = 0;
    this.shades = [];
    this.pending = 0;
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    canvas.addEventListener("pointermove", (event) => this.#point(event));
    canvas.addEventListener("pointerleave", () => {
      tip.hidden = true;
    });
    this.retheme();
  }

  setLayers(count) {
    this.layers = count;
    this.frames = [];
    this.draw();
  }

  push(frames) {
    this.frames.push(...frames);
    this.frames.splice(0, Math.max(0, this.frames.length - 600));
    cancelAnimationFrame(this.pending);
    this.pending = requestAnimationFrame(() => this.draw());
  }

  /** Read the colours of the style sheet anew. */
  retheme() {
    const style = getComputedStyle(document.documentElement);
    const [none, all] = ["--heat-none", "--heat-all"].map((name) => channels(style.getPropertyValue(name)));
    this.shades = Array.from({ length: SHADES + 1 }, (_, i) => {
      const mixed = none.map((from, c) => Math.round(from + ((all[c] - from) * i) / SHADES));
      return `rgb(${mixed.join(" ")})`;
    });
    this.empty = style.getPropertyValue("--heat-empty");
    this.prompt = style.getPropertyValue("--heat-prompt");
    this.draw();
  }

  get row() {
    return Math.max(2, Math.min(14, Math.floor(HEIGHT / Math.max(this.layers, 1))));
  }

  draw() {
    const { canvas, layers, row } = this;
    const width = canvas.parentElement.clientWidth;
    if (!width || !layers) return;
    const height = layers * row + LANE + 2;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const columns = Math.floor((width + GAP) / CELL);
    const shown = this.frames.slice(-columns);
    const inner = row > 3 ? row - GAP : row;
    const [low, high] = range(shown);
    this.scaled(low, high);
    const shade = (part) => this.shades[Math.round(Math.max(0, Math.min(1, (part - low) / (high - low))) * SHADES)];
    for (let column = 0; column < columns; column += 1) {
      const frame = shown[column - (columns - shown.length)];
      const x = column * CELL;
      for (let layer = 0; layer < layers; layer += 1) {
        pen.fillStyle = frame ? shade(frame.layers[layer]) : this.empty;
        pen.fillRect(x, layer * row, CELL - GAP, inner);
      }
      if (frame && isPrompt(frame)) {
        pen.fillStyle = this.prompt;
        pen.fillRect(x, layers * row + 2, CELL - GAP, LANE - 1);
      }
    }
  }

  #point(event) {
    const { row, layers, tip } = this;
    const box = this.canvas.getBoundingClientRect();
    const columns = Math.floor((box.width + GAP) / CELL);
    const column = Math.floor((event.clientX - box.left) / CELL);
    const layer = Math.floor((event.clientY - box.top) / row);
    const shown = this.frames.slice(-columns);
    const frame = shown[column - (columns - shown.length)];
    tip.hidden = !frame || layer < 0 || layer >= layers;
    if (tip.hidden) return;
    const tokens = `${frame.rows} token${frame.rows === 1 ? "" : "s"}`;
    tip.textContent = `layer ${layer}: ${percent(frame.layers[layer])} · ${tokens}${isPrompt(frame) ? ", prompt" : ""}`;
    const left = Math.min(event.clientX - box.left, box.width - tip.offsetWidth);
    tip.style.left = `${Math.max(0, left)}px`;
    tip.style.top = `${Math.max(0, event.clientY - box.top - tip.offsetHeight - 10)}px`;
  }
}

/** Whether more tokens went through the model than came out: some were a prompt's. */
export function isPrompt(frame) {
  return frame.rows > frame.tokens;
}

/** Tenths between which the layers of the answers lie, so that their differences show; a dense model's are 0 to 1. */
function range(frames) {
  const parts = frames.filter((frame) => !isPrompt(frame)).flatMap((frame) => frame.layers).sort((a, b) => a - b);
  if (!parts.length || parts[0] >= 1) return [0, 1];
  const at = (share) => parts[Math.floor(share * (parts.length - 1))];
  const low = Math.floor(at(0.02) * 10 - 1e-6) / 10;
  return [Math.max(0, low), Math.min(1, Math.max(low + 0.2, Math.ceil(at(0.98) * 10 + 1e-6) / 10))];
}

export function percent(fraction) {
  return `${Math.round(fraction * 100)} %`;
}

function channels(hex) {
  return [1, 3, 5].map((at) => Number.parseInt(hex.trim().slice(at, at + 2), 16));
}
