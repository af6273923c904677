"use strict";
(() => {
  const say = (text) => { document.getElementById("status").textContent = text; };

  // Figures enlarge in a dialog, which the browser itself closes on Escape.
  const viewer = document.getElementById("viewer");
  const stage = viewer.querySelector(".stage");
  document.querySelectorAll("[data-enlarge]").forEach((button) => {
    button.addEventListener("click", () => {
      const image = button.querySelector("img").cloneNode();
      // As large as the window lets all of it be seen, but never too small to read.
      const width = Number(image.getAttribute("width"));
      const shape = width / Number(image.getAttribute("height"));
      const whole = Math.min(window.innerWidth * 0.94, window.innerHeight * 0.84 * shape);
      image.width = Math.round(Math.max(Math.min(whole, width * 2), width));
      image.removeAttribute("height");
      stage.replaceChildren(image);
      document.getElementById("viewer-title").textContent =
        button.closest("figure").querySelector("figcaption span").textContent;
      viewer.showModal();
    });
  });
  viewer.querySelector("[data-close]").addEventListener("click", () => viewer.close());
  viewer.addEventListener("click", (event) => { if (event.target === viewer) viewer.close(); });
  viewer.addEventListener("close", () => stage.replaceChildren());

  // Tables sort by the column whose heading is pressed; empty cells stay last.
  document.querySelectorAll("[data-sort]").forEach((button) => {
    button.addEventListener("click", () => {
      const heading = button.closest("th");
      const body = heading.closest("table").tBodies[0];
      const column = heading.cellIndex;
      const numeric = heading.classList.contains("num");
      const before = heading.getAttribute("aria-sort");
      const first = numeric ? "descending" : "ascending";
      const order = before === null ? first : before === "ascending" ? "descending" : "ascending";
      for (const other of heading.parentNode.cells) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const key = (row) => row.cells[column].dataset.v;
      const rows = Array.from(body.rows).sort((a, b) => {
        const x = key(a), y = key(b);
        if (x === "" || y === "") return (x === "") - (y === "");
        return sign * (numeric ? Number(x) - Number(y) : x.localeCompare(y));
      });
      body.replaceChildren(...rows);
      say(`Sorted by ${button.textContent}, ${order}.`);
    });
  });

  // Copying works from a file too, where the clipboard may be out of reach.
  document.querySelectorAll("[data-copy]").forEach((button) => {
    button.addEventListener("click", async () => {
      const source = document.getElementById(button.dataset.copy);
      let done = false;
      try {
        await navigator.clipboard.writeText(source.textContent);
        done = true;
      } catch {
        const range = document.createRange();
        range.selectNodeContents(source);
        const selection = window.getSelection();
        selection.removeAllRanges();
        selection.addRange(range);
        done = document.execCommand("copy");
      }
      button.textContent = done ? "Copied" : "Press Ctrl+C";
      say(done ? "The command is copied." : "The command is selected: press Ctrl+C.");
      window.setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
  });

  // The contents are open where there is room for them; everything is open on paper.
  const contents = document.querySelector("nav details");
  if (window.matchMedia("(max-width: 62rem)").matches) contents.open = false;
  window.addEventListener("beforeprint", () => {
    document.querySelectorAll("main details").forEach((details) => { details.open = true; });
  });

  // Mark in the contents what is being read.
  const links = new Map(Array.from(document.querySelectorAll("nav a"), (a) => [a.hash.slice(1), a]));
  const watch = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      links.forEach((a) => a.removeAttribute("aria-current"));
      links.get(entry.target.id)?.setAttribute("aria-current", "true");
    }
  }, { rootMargin: "-10% 0px -80% 0px" });
  document.querySelectorAll("main > section").forEach((section) => watch.observe(section));
})();
