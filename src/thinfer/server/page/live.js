// The live view: follows /v1/live and shows speed, weights read, density by layer and the KV cache.

/* global uPlot */

import { events } from "./api.js";
import { HeatStrip, isPrompt, percent } from "./heat.js";

const BUCKET = 0.5;
const BUCKETS = 120;
// Figures are means over this many seconds of work.
const RECENT = 1;
const RETRY = [1000, 2000, 5000, 10000];
const KINDS = { qkv: "Attention in", o: "Attention out", gate_up: "FFN in", down: "FFN out" };
const MIB = 1 << 20;

const find = (id) => document.getElementById(id);

export class LiveView {
  /** @param {(model: object) => void} known called with what the server says of its model */
  constructor(known) {
    this.known = known;
    this.heat = new HeatStrip(find("heat"), find("heat-tip"), (low, high) => {
      find("heat-low").textContent = percent(low);
      find("heat-high").textContent = percent(high);
    });
    this.frames = [];
    this.buckets = new Map();
    this.stopper = null;
    // The server's clock, and this page's when it said so.
    this.at = 0;
    this.heard = performance.now();
    this.chart = this.#makeChart();
    new ResizeObserver(() => this.#resize()).observe(find("speed-chart"));
    setInterval(() => this.#drawChart(), 1000 * BUCKET);
    document.addEventListener("visibilitychange", () => (document.hidden ? this.stop() : this.start()));
  }

  /** Follow the server until `stop`; connects again whenever the stream ends. */
  async start() {
    if (this.stopper) return;
    const stopper = new AbortController();
    this.stopper = stopper;
    for (let failures = 0; !stopper.signal.aborted; failures += 1) {
      try {
        for await (const event of events("/v1/live", { signal: stopper.signal })) {
          failures = 0;
          this.#take(event);
        }
      } catch (error) {
        if (error.name === "AbortError") return;
      }
      this.#state("off", "reconnecting…");
      await new Promise((resolve) => setTimeout(resolve, RETRY[Math.min(failures, RETRY.length - 1)]));
    }
  }

  stop() {
    this.stopper?.abort();
    this.stopper = null;
  }

  retheme() {
    this.heat.retheme();
    this.chart.destroy();
    this.chart = this.#makeChart();
    this.#drawChart();
  }

  #take({ model, frames, now }) {
    if (model) this.#meet(model);
    if (frames.length) {
      this.frames.push(...frames);
      this.frames.splice(0, Math.max(0, this.frames.length - 200));
      for (const frame of frames) this.#spread(frame);
      this.at = frames.at(-1).at;
      this.heard = performance.now();
      this.heat.push(frames);
      this.#figures();
    }
    this.#queue(now, frames.length > 0);
  }

  #meet(model) {
    this.model = model;
    this.frames = [];
    this.buckets.clear();
    this.heat.setLayers(model.layers);
    find("last-layer").textContent = String(model.layers - 1);
    find("kv-size").textContent = `${model.kv_tokens.toLocaleString("en")} tokens`;
    const note = find("live-note");
    note.hidden = model.sparse !== null;
    note.textContent = "This model runs dense: every weight is read. thinfer calibrate finds thresholds that skip some.";
    this.known(model);
  }

  /** Tokens of a frame over the half seconds that it lasted. */
  #spread({ at, seconds, tokens }) {
    const from = at - seconds;
    for (let bucket = Math.floor(from / BUCKET); bucket * BUCKET < at; bucket += 1) {
      const overlap = Math.min(at, (bucket + 1) * BUCKET) - Math.max(from, bucket * BUCKET);
      const share = seconds > 0 ? overlap / seconds : 1;
      this.buckets.set(bucket, (this.buckets.get(bucket) ?? 0) + tokens * share);
    }
  }

  #recent() {
    const chosen = [];
    let seconds = 0;
    for (let i = this.frames.length - 1; i >= 0 && seconds < RECENT; i -= 1) {
      // What a prompt reads is shared by all its tokens: a figure of its own that says little of the answer.
      if (isPrompt(this.frames[i])) continue;
      chosen.push(this.frames[i]);
      seconds += this.frames[i].seconds;
    }
    return { chosen, seconds };
  }

  #figures() {
    const { chosen, seconds } = this.#recent();
    if (!chosen.length) return;
    const sum = (name) => chosen.reduce((total, frame) => total + frame[name], 0);
    const mean = (pick) => chosen.reduce((total, frame) => total + pick(frame) * frame.rows, 0) / sum("rows");
    const speed = sum("tokens") / seconds;
    const read = sum("bytes") / sum("tokens") / MIB;
    const dense = sum("dense_bytes") / sum("tokens") / MIB;
    const density = mean((frame) => frame.density);
    find("speed").textContent = short(speed);
    find("read").textContent = short(read);
    find("dense").textContent = `of ${short(dense)} dense`;
    // Where reading in order was measured to be faster than skipping, unused weights are read and count as zeros.
    find("saved").textContent = read < 0.995 * dense ? `${percent(1 - read / dense)} not read` : density < 1 ? "all, in order" : "";
    meter("read-meter", [read / dense]);
    find("density").textContent = `${percent(density)} on average`;
    // Neurons that do not fire are skipped without thresholds.
    if (density < 1) find("live-note").hidden = true;
    this.#kinds(Object.keys(KINDS).map((kind) => [KINDS[kind], mean((frame) => frame.kinds[kind] ?? 1)]));
    const layers = Array.from({ length: this.model.layers }, (_, layer) => mean((frame) => frame.layers[layer]));
    const [least, most] = [Math.min(...layers), Math.max(...layers)];
    find("heat").setAttribute(
      "aria-label",
      `Weights used by layer: least ${percent(least)} in layer ${layers.indexOf(least)}, ` +
        `most ${percent(most)} in layer ${layers.indexOf(most)}.`,
    );
    const ticker = find("ticker");
    ticker.hidden = false;
    ticker.replaceChildren(
      strong(short(speed), " tokens/s"),
      strong(percent(density), " of weights"),
      strong(short(read), " MiB/token"),
    );
  }

  #kinds(rows) {
    const list = find("kinds");
    if (list.children.length !== rows.length) {
      list.replaceChildren(
        ...rows.map(([name]) => {
          const row = document.createElement("div");
          const term = document.createElement("dt");
          term.textContent = name;
          const value = document.createElement("dd");
          value.append(document.createElement("i"), document.createElement("span"));
          row.append(term, value);
          return row;
        }),
      );
    }
    rows.forEach(([, density], place) => {
      const [bar, text] = list.children[place].lastChild.children;
      bar.style.setProperty("--part", density);
      text.textContent = percent(density);
    });
  }

  #queue(now, worked) {
    const waiting = now.waiting ? `, ${now.waiting} waiting` : "";
    find("requests").textContent = now.running || now.waiting ? `${now.running} running${waiting}` : "";
    meter("kv-meter", [now.kv_used, now.kv_cached]);
    find("kv-used").textContent = `${percent(now.kv_used)} in use`;
    find("kv-cached").textContent = `${percent(now.kv_cached)} kept for reuse`;
    find("recall").hidden = now.recall === null;
    find("recall").textContent = `Predictors find ${(100 * now.recall).toFixed(1)} % of the neurons that fire.`;
    const busy = worked || now.running > 0;
    this.#state(busy ? "busy" : "idle", busy ? "running" : "idle");
  }

  #state(name, text) {
    const state = find("live-state");
    state.textContent = text;
    find("live").dataset.state = name;
  }

  #makeChart() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = { stroke: colour("--muted"), font: "11px system-ui, sans-serif", ticks: { show: false } };
    const grid = { stroke: colour("--line"), width: 1 };
    const host = find("speed-chart");
    const options = {
      width: host.clientWidth || 320,
      height: 104,
      padding: [8, 16, 0, 0],
      legend: { show: false },
      cursor: { show: false },
      scales: { x: { time: false, range: [-BUCKETS * BUCKET, 0] }, y: { range: (_, __, max) => [0, niceTop(max)] } },
      axes: [
        { ...axis, size: 22, gap: 6, grid: { show: false }, splits: () => [-45, -30, -15, 0], values: (_, at) => at.map(ago) },
        { ...axis, size: 34, gap: 4, grid, splits: (u) => [0, u.scales.y.max / 2, u.scales.y.max] },
      ],
      series: [{}, { stroke: colour("--accent"), fill: colour("--accent-faint"), width: 1.5, points: { show: false } }],
    };
    return new uPlot(options, this.#series(), host);
  }

  #series() {
    const newest = Math.floor((this.at + (performance.now() - this.heard) / 1000) / BUCKET) - 1;
    const xs = [];
    const ys = [];
    for (let i = -BUCKETS; i <= 0; i += 1) {
      xs.push(i * BUCKET);
      // Over two buckets: a slow model's tokens would flicker.
      ys.push(((this.buckets.get(newest + i) ?? 0) + (this.buckets.get(newest + i - 1) ?? 0)) / (2 * BUCKET));
    }
    for (const bucket of this.buckets.keys()) if (bucket < newest - BUCKETS - 2) this.buckets.delete(bucket);
    return [xs, ys];
  }

  #drawChart() {
    if (!document.hidden) this.chart.setData(this.#series());
  }

  #resize() {
    const width = find("speed-chart").clientWidth;
    if (width) this.chart.setSize({ width, height: 104 });
  }
}

function ago(second) {
  return second ? `−${-second} s` : "now";
}

function niceTop(max) {
  if (!(max > 0)) return 10;
  const unit = 10 ** Math.floor(Math.log10(max));
  return [1, 2, 4, 6, 10].map((step) => step * unit).find((top) => top >= max);
}

function short(value) {
  if (value >= 100) return Math.round(value).toLocaleString("en");
  return value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

function strong(figure, unit) {
  const node = document.createElement("span");
  const bold = document.createElement("b");
  bold.textContent = figure;
  node.append(bold, unit);
  return node;
}

function meter(id, parts) {
  const node = find(id);
  node.setAttribute("aria-valuenow", String(Math.round(parts[0] * 100)));
  parts.forEach((part, place) => node.children[place].style.setProperty("--part", Math.min(1, part)));
}
