// Requests to this server: JSON, and server-sent events over fetch (EventSource can neither POST nor send a key).

const KEY = "thinfer.key";

// What asks the reader for a key, and the question that is open: requests that fail together ask once.
const asking = { ask: null, open: null };

/** A failure with the server's own words. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

/** Have `ask(wrong)` called when the server wants a key; it sets one and resolves to true, or to false. */
export function onKeyNeeded(ask) {
  asking.ask = ask;
}

async function askKey(tried) {
  // Another request may have asked meanwhile.
  if (tried !== sessionStorage.getItem(KEY)) return true;
  asking.open ??= asking.ask(tried !== null).finally(() => {
    asking.open = null;
  });
  return asking.open;
}

function headers(body) {
  const given = {};
  if (body !== undefined) given["Content-Type"] = "application/json";
  const key = sessionStorage.getItem(KEY);
  if (key) given.Authorization = `Bearer ${key}`;
  return given;
}

async function send(path, { body, signal } = {}) {
  const key = sessionStorage.getItem(KEY);
  let response;
  try {
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers: headers(body),
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer. Is it still running?");
  }
  if (response.ok) return response;
  if (response.status === 401 && (await askKey(key))) return send(path, { body, signal });
  let message = `The server answered ${response.status}.`;
  try {
    message = (await response.json()).error.message ?? message;
  } catch {
    // Not every proxy answers in JSON; the status says enough.
  }
  const after = response.headers.get("retry-after");
  if (response.status === 429 && after) message += ` Free again in about ${after} s.`;
  throw new ApiError(response.status, message);
}

export async function getJson(path, body, signal) {
  return (await send(path, { body, signal })).json();
}

/** Yields the objects of a stream of events until it ends, `[DONE]` comes, or the signal aborts. */
export async function* events(path, { body, signal } = {}) {
  const response = await send(path, { body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      const parts = rest.split(/\r?\n\r?\n/);
      rest = parts.pop();
      for (const part of parts) {
        const data = part
          .split(/\r?\n/)
          .filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5).trimStart())
          .join("\n");
        if (data === "[DONE]") return;
        if (!data) continue;
        const item = JSON.parse(data);
        if (item.error) throw new ApiError(item.error.code ?? 500, item.error.message);
        yield item;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
