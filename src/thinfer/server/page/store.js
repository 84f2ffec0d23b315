// What the browser keeps between visits. Where storage is forbidden or full, it lasts as long as the page.

export function remember(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
  } catch {
    // Nothing to be done, and nothing lost that this page needs.
  }
}

/** What was remembered, or null. */
export function recall(name) {
  try {
    return JSON.parse(localStorage.getItem(name));
  } catch {
    return null;
  }
}
