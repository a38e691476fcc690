/* The page: which run is open, and in which view. Every view is a pure function of a trace.

   Traces come from #outrider-data (a self-contained file), from examples/ in this folder (served), from files that
   are dropped or picked, or from live.js, which is loaded only from a server that announces it:

     mountLive(section, app)      app.open(run, title) opens a run for the other views; app.report(message) is for problems */

import { el, replace } from "./dom.js";
import { mountExplain } from "./explain.js";
import { exampleSteps } from "./highlights.js";
import { LIMITS, TraceError, parseTrace } from "./trace.js";
import { mountRun } from "./view.js";
import { mountWhatIf } from "./whatif.js";

const VIEWS = ["explain", "run", "whatif", "live"];
const $ = (id) => document.getElementById(id);
const app = { runs: [], current: null, fallback: null, mounted: new Map(), open, report };

/* ---------------------------------------------------------------- runs */

async function open(run, title = run.title) {
  if (!app.runs.some((each) => each.run === run)) app.runs.push({ title, run });
  if (!exampleSteps(run)) app.fallback ??= await read(app.runs.find((each) => each.bundled)); // for the stations
  app.current = run;
  listRuns();
  unmount();
  show();
}

function listRuns() {
  replace(
    $("runs"),
    app.runs.map(({ title, run }, i) =>
      el("option", { value: i, selected: run !== null && run === app.current }, title.slice(0, 60)),
    ),
  );
}

async function read(entry) {
  if (entry) entry.run ??= parseTrace(await entry.load(), entry.title);
  return entry?.run ?? null;
}

async function choose(entry) {
  await open(await read(entry), entry.title);
}

/** Show a problem over the page, where the reader is; an empty message clears it. */
function report(message) {
  $("problem-text").textContent = message;
  $("problem").hidden = !message;
}

async function attempt(work) {
  try {
    await work();
    report("");
  } catch (error) {
    if (error instanceof TraceError) report(error.message);
    else {
      report("This trace cannot be shown: it does not have the format that Outrider writes.");
      console.warn(error);
    }
  }
}

async function openFiles(files) {
  for (const file of files) {
    if (file.size > LIMITS.characters * 4)
      throw new TraceError(
        `${file.name} has ${Math.round(file.size / 1e6)} MB; this page reads at most ${LIMITS.characters / 1e6} million characters.`,
      );
    const run = parseTrace(await file.text(), file.name);
    if (location.hash !== "#whatif") history.replaceState(null, "", "#run");
    await open(run, file.name);
  }
}

/* ---------------------------------------------------------------- views */

function view() {
  const name = location.hash.slice(1);
  return VIEWS.includes(name) && !$(`tab-${name}`).hidden ? name : app.start;
}

const MAKE = {
  explain: (section) => mountExplain(section, app.current, app.fallback),
  run: (section) => mountRun(section, app.current),
  whatif: (section) => mountWhatIf(section, app.current),
};

function show() {
  const name = view();
  if (name !== app.shown) scrollTo(0, 0);
  if (name !== app.shown) app.mounted.get(app.shown)?.hide?.(); // nothing plays unseen
  app.shown = name;
  for (const each of VIEWS) {
    $(each).hidden = each !== name;
    if (each === name) $(`tab-${each}`).setAttribute("aria-current", "page");
    else $(`tab-${each}`).removeAttribute("aria-current");
  }
  if (app.current && MAKE[name] && !app.mounted.has(name)) app.mounted.set(name, MAKE[name]($(name)));
}

function unmount() {
  for (const name of Object.keys(MAKE)) app.mounted.get(name)?.destroy?.();
  for (const name of Object.keys(MAKE)) app.mounted.delete(name);
}

/* ---------------------------------------------------------------- frame */

function theme() {
  const dark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  $("theme").setAttribute("aria-pressed", String(!dark));
  document.dispatchEvent(new Event("outrider:theme"));
}

function listen() {
  addEventListener("hashchange", show);
  $("theme").addEventListener("click", theme);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
    document.dispatchEvent(new Event("outrider:theme")),
  );
  $("runs").addEventListener("change", (event) => attempt(() => choose(app.runs[Number(event.target.value)])));
  $("file").addEventListener("change", (event) => attempt(() => openFiles(event.target.files)));
  $("open").addEventListener("click", () => $("file").click());
  $("problem-close").addEventListener("click", () => report(""));
  document.querySelector(".skip").addEventListener("click", (event) => (event.preventDefault(), $("main").focus())); // the hash names views
  document.addEventListener("keydown", key);
  for (const kind of ["dragover", "dragenter"])
    document.addEventListener(kind, (event) => (event.preventDefault(), document.body.classList.add("dropping")));
  for (const kind of ["dragleave", "drop"])
    document.addEventListener(kind, () => document.body.classList.remove("dropping"));
  document.addEventListener(
    "drop",
    (event) => (event.preventDefault(), attempt(() => openFiles(event.dataTransfer.files))),
  );
}

/** Keys go to the view that is shown, wherever they are pressed; a run handles those inside it itself. */
function key(event) {
  const free = event.target === document.body || event.target === $("main");
  if (free || view() === "explain") app.mounted.get(view())?.key?.(event);
}

/** The traces that come with the page: embedded in it, or in examples/. */
async function bundled() {
  const embedded = $("outrider-data");
  if (embedded) {
    const { start, traces } = JSON.parse(embedded.textContent);
    app.start = start;
    return traces.map(({ title, text, bundled }) => ({ title, bundled, run: null, load: async () => text }));
  }
  const entries = await (await fetch("examples/index.json")).json();
  return entries.map(({ title, file }) => ({
    title,
    bundled: true,
    run: null,
    load: async () => (await fetch(`examples/${file}`)).text(),
  }));
}

/** Where a server answers, the page opens with Live. */
async function live() {
  const served = document.querySelector('meta[name="outrider-live"]')?.content === "1";
  if (!served || !location.protocol.startsWith("http")) return;
  const { mountLive } = await import("./live.js");
  $("tab-live").hidden = false;
  app.start = "live";
  app.mounted.set("live", mountLive($("live"), app));
}

async function begin() {
  app.start = "explain";
  listen();
  await attempt(live);
  await attempt(async () => {
    app.runs = await bundled();
    await choose(app.runs[0]);
  });
  document.documentElement.dataset.ready = "1";
}

begin();
