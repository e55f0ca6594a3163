// Updates of the open page, the keyboard, and the sign-in link. The pages work without it.
"use strict";

const live = document.getElementById("live");
const offline = document.getElementById("offline");
const updated = document.getElementById("updated");

function isBusy() {
  const selection = window.getSelection();
  const selects = selection && !selection.isCollapsed && live.contains(selection.anchorNode);
  const focused = document.activeElement;
  return selects || (live.contains(focused) && focused.matches("input, select, textarea"));
}

function show(html) {
  const parsed = new DOMParser().parseFromString(`<div>${html}</div>`, "text/html").body.firstChild;
  const scrolled = [...live.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
  const focused = live.contains(document.activeElement) ? document.activeElement : null;
  const href = focused && focused.getAttribute("href");
  const row = rowNumber();
  live.replaceChildren(...parsed.childNodes);
  live.querySelectorAll(".scroll").forEach((one, number) => { one.scrollLeft = scrolled[number] || 0; });
  if (row >= 0) mark(row);
  if (href) [...live.querySelectorAll("a")].find((one) => one.getAttribute("href") === href)?.focus();
  updated.textContent = `Updated ${new Date().toISOString().slice(11, 19)}`;
}

function follow() {
  const address = new URL(window.location.href);
  address.searchParams.set("live", "1");
  const source = new EventSource(address);
  let waiting = null;
  const apply = (html) => {
    if (isBusy()) { waiting = html; return; }
    waiting = null;
    show(html);
  };
  source.addEventListener("live", (event) => {
    offline.hidden = true;
    apply(JSON.parse(event.data));
    document.documentElement.dataset.live = "on";
  });
  source.addEventListener("problem", (event) => {
    const problem = JSON.parse(event.data);
    offline.textContent = `Not updated: ${problem.reason}: ${problem.message} ${problem.remedy}`;
    offline.hidden = false;
  });
  source.addEventListener("error", () => {
    offline.textContent = source.readyState === EventSource.CLOSED
      ? "This page is not updated: sign in again, or too many pages are open. It shows the state at loading."
      : "The console does not answer. The page shows the last state, and tries again.";
    offline.hidden = false;
  });
  document.addEventListener("selectionchange", () => { if (waiting && !isBusy()) apply(waiting); });
  window.addEventListener("pagehide", () => source.close());
}

// ---- keyboard

const rows = () => [...document.querySelectorAll("table.rows tbody tr")];
const rowNumber = () => rows().findIndex((row) => row.classList.contains("here"));

function mark(number) {
  const all = rows();
  if (!all.length) return;
  all.forEach((row) => row.classList.remove("here"));
  const row = all[Math.min(Math.max(number, 0), all.length - 1)];
  row.classList.add("here");
  row.scrollIntoView({ block: "nearest" });
}

let prefix = "";
const actions = {
  "/": () => document.querySelector("[data-search]")?.focus(),
  j: () => mark(rowNumber() + 1),
  k: () => mark(rowNumber() - 1),
  n: () => document.querySelector("a[rel=next]")?.click(),
  p: () => document.querySelector("a[rel=prev]")?.click(),
  "?": () => document.getElementById("keys").showModal(),
  Enter: () => rows()[rowNumber()]?.querySelector("a")?.click(),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (event.key === "Enter" && event.target !== document.body) return;
  if (prefix === "g") {
    prefix = "";
    document.querySelector(`.top nav a[data-key="${CSS.escape(event.key)}"]`)?.click();
    return;
  }
  if (event.key === "g") { prefix = "g"; return; }
  const action = actions[event.key];
  if (action) { event.preventDefault(); action(); }
});

// ---- sign-in by a link with the key in its fragment, which browsers send to no server

const form = document.getElementById("sign-in");
const key = new URLSearchParams(window.location.hash.slice(1)).get("key");
if (form && key) {
  history.replaceState(null, "", window.location.pathname + window.location.search);
  form.elements.token.value = key;
  form.submit();
}
if (live && live.dataset.live) follow();
