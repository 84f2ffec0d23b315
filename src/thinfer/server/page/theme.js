// Before the first paint, so that the page never flashes in the other theme.
(() => {
  let choice = null;
  try {
    choice = JSON.parse(localStorage.getItem("thinfer.theme"));
  } catch {
    // Storage may be forbidden or damaged; the system's theme is used then.
  }
  const system = window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  document.documentElement.dataset.theme = choice === "light" || choice === "dark" ? choice : system;
})();
