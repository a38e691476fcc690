/* The form of the Live view: prompt, drafters, temperature, length. The key stays in this page's memory. */

import { el, prefersReducedMotion, replace } from "./dom.js";

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
  const temperature = el("input", {
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
  const full = el("input", { id: "live-full", type: "checkbox", checked: true });
  const about = el("p", { class: "note", id: "live-about" });
  const go = el("button", { type: "submit", class: "primary" }, "Run the race");
  const cancel = el("button", { type: "button", disabled: true, onclick: stop }, "Stop");
  const presets = PRESETS.map((preset) =>
    el("button", { type: "button", onclick: () => (fill(preset.prompt), start(preset.title)) }, preset.title),
  );
  const both = el("button", { type: "button", onclick: () => compare(PRESETS) }, "Compare the two");
  const acts = el(
    "div",
    { class: "acts" },
    go,
    cancel,
    el("span", { class: "presets", role: "group", "aria-label": "Presets" }, presets, both),
  );
  let available = null;

  const element = el(
    "form",
    { class: "panel live-form", "aria-label": "Request" },
    field("Prompt", prompt, "whole"),
    el(
      "div",
      { class: "fields" },
      field("Drafter", first),
      field("Second drafter", second),
      field("Temperature", temperature),
      field("Seed", seed),
      field("Maximum tokens", tokens),
      keyed ? field("API key", key) : null,
    ),
    about,
    keyed
      ? el(
          "p",
          { class: "note" },
          "The key stays in this page’s memory: it is sent to this server only and is gone when the page is closed.",
        )
      : null,
    el(
      "div",
      { class: "ticks" },
      tick("Record the target’s top five at every node (takes a little time)", full),
      tick("Continue the prompt as plain text, without the chat template", raw),
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
    about.textContent = available?.find((each) => each.id === first.value)?.about ?? "";
  }

  /** Show what GET /v1/drafters returned: drafters, the default first, and limits. */
  function setDrafters(list) {
    available = list.data.filter((each) => each.id !== "off");
    const option = (each, chosen) => el("option", { value: each.id, selected: chosen }, each.id);
    replace(
      first,
      available.length
        ? available.map((each) => option(each, each.default))
        : el("option", { value: "off" }, "none: this server runs without a drafter"),
    );
    replace(
      second,
      el("option", { value: "" }, "none"),
      available.map((each) => option(each, false)),
    );
    tokens.max = String(list.limits.max_tokens);
    temperature.max = String(list.limits.temperature);
    describe();
  }

  return {
    element,
    fill,
    setDrafters,
    get key() {
      return key.value;
    },
    get connected() {
      return available !== null;
    },
    valid: () => element.reportValidity(),
    running(on) {
      if (on) acts.scrollIntoView({ block: "start", behavior: prefersReducedMotion() ? "auto" : "smooth" }); // the result is below
      cancel.disabled = !on;
      for (const button of [go, both, ...presets]) button.disabled = on;
      if (on) cancel.focus({ preventScroll: true });
      else if (document.activeElement === cancel || document.activeElement === document.body)
        go.focus({ preventScroll: true });
    },
    settings: () => ({
      prompt: prompt.value,
      raw: raw.checked,
      temperature: Number(temperature.value),
      seed: Number(seed.value),
      tokens: Number(tokens.value),
      level: full.checked ? "full" : "summary",
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
