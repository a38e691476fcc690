/* What is asked: the prompt, who drafts, how warm, how long. It keeps the key in this page's memory and nowhere else. */

import { el, prefersStill, replace } from "./dom.js";

export const PRESETS = [
  {
    title: "Code",
    prompt:
      "Rewrite this function with type hints and a docstring, and keep the rest as it is:\n\n" +
      "def area(width, height):\n    if width < 0 or height < 0:\n        raise ValueError('sides must not be negative')\n    return width * height\n",
  },
  { title: "Creative writing", prompt: "Write a short story about a lighthouse keeper who finds a door in the sea." },
];

export function makeForm({ keyed, start, stop, compare, connect }) {
  const prompt = el("textarea", {
    id: "live-prompt",
    rows: 6,
    required: true,
    spellcheck: "false",
    maxlength: 100_000,
  });
  prompt.value = PRESETS[0].prompt;
  const first = el("select", { id: "live-drafter" });
  const second = el("select", { id: "live-second" });
  const warmth = el("input", {
    id: "live-temperature",
    type: "number",
    min: 0,
    max: 100,
    step: "any",
    value: 0,
    required: true,
  });
  const seed = el("input", {
    id: "live-seed",
    type: "number",
    min: 0,
    max: 2 ** 53 - 1,
    step: 1,
    value: 7,
    required: true,
  });
  const tokens = el("input", {
    id: "live-tokens",
    type: "number",
    min: 2,
    max: 4096,
    step: 1,
    value: 128,
    required: true,
  });
  const key = el("input", {
    id: "live-key",
    type: "password",
    autocomplete: "off",
    spellcheck: "false",
    onchange: connect,
  });
  const raw = el("input", { id: "live-raw", type: "checkbox" });
  const thoughts = el("input", { id: "live-full", type: "checkbox", checked: true });
  const about = el("p", { class: "note", id: "live-about" });
  const go = el("button", { type: "submit", class: "primary" }, "Run the race");
  const halt = el("button", { type: "button", disabled: true, onclick: stop }, "Stop");
  const presets = PRESETS.map((preset) =>
    el("button", { type: "button", onclick: () => (fill(preset.prompt), start(preset.title)) }, preset.title),
  );
  const both = el("button", { type: "button", onclick: () => compare(PRESETS) }, "Compare the two");
  const acts = el(
    "div",
    { class: "acts" },
    go,
    halt,
    el("span", { class: "presets", role: "group", "aria-label": "Presets" }, presets, both),
  );
  let offered = null;

  const element = el(
    "form",
    { class: "panel live-form", "aria-label": "What to ask" },
    field("Prompt", prompt, "whole"),
    el(
      "div",
      { class: "fields" },
      field("Drafter", first),
      field("Against a second one", second),
      field("Temperature", warmth),
      field("Seed", seed),
      field("Tokens at most", tokens),
      keyed ? field("API key", key) : null,
    ),
    about,
    keyed
      ? el(
          "p",
          { class: "note" },
          "The key stays in this page’s memory: it is sent to this server only, and forgotten when the page is closed.",
        )
      : null,
    el(
      "div",
      { class: "ticks" },
      tick("Record what the target thought at every node (takes a little time)", thoughts),
      tick("Continue the text as it is, without the chat template", raw),
    ),
    acts,
  );
  element.addEventListener("submit", (event) => (event.preventDefault(), start()));
  element.addEventListener("keydown", (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && start());
  document.addEventListener("keydown", (event) => event.key === "Escape" && stop());
  first.addEventListener("change", describe);

  function fill(text) {
    prompt.value = text;
  }

  function describe() {
    about.textContent = offered?.find((each) => each.id === first.value)?.about ?? "";
  }

  /** What the server has: drafters by name, the default first, and how long an answer may be. */
  function offer(told) {
    offered = told.data.filter((each) => each.id !== "off");
    const option = (each, chosen) => el("option", { value: each.id, selected: chosen }, each.id);
    replace(
      first,
      offered.length
        ? offered.map((each) => option(each, each.default))
        : el("option", { value: "off" }, "none: this server runs without a drafter"),
    );
    replace(
      second,
      el("option", { value: "" }, "none"),
      offered.map((each) => option(each, false)),
    );
    tokens.max = String(told.limits.max_tokens);
    warmth.max = String(told.limits.temperature);
    describe();
  }

  return {
    element,
    fill,
    offer,
    get key() {
      return key.value;
    },
    get connected() {
      return offered !== null;
    },
    valid: () => element.reportValidity(),
    running(on) {
      if (on) acts.scrollIntoView({ block: "start", behavior: prefersStill() ? "auto" : "smooth" }); // what comes is below
      halt.disabled = !on;
      for (const button of [go, both, ...presets]) button.disabled = on;
      if (on) halt.focus({ preventScroll: true });
      else if (document.activeElement === halt || document.activeElement === document.body)
        go.focus({ preventScroll: true });
    },
    settings: () => ({
      prompt: prompt.value,
      raw: raw.checked,
      temperature: Number(warmth.value),
      seed: Number(seed.value),
      tokens: Number(tokens.value),
      level: thoughts.checked ? "full" : "summary",
      drafters: [...new Set([first.value, second.value].filter(Boolean))],
    }),
  };
}

function field(label, input, name = "") {
  return el("div", { class: `field ${name}` }, el("label", { for: input.id }, label), input);
}

function tick(label, input) {
  return el("label", { class: "tick" }, input, ` ${label}`);
}
