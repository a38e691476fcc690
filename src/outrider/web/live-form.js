/* The chat box of the Live view, and its settings. The key stays in this page's memory. */

import { el, replace } from "./dom.js";

export const PRESETS = [
  {
    title: "Edit a function",
    prompt:
      "Rewrite this function with type hints and a docstring, and keep the rest as it is:\n\n" +
      "def area(width, height):\n    if width < 0 or height < 0:\n        raise ValueError('sides must not be negative')\n    return width * height\n",
  },
  { title: "Explain something", prompt: "Explain in a few sentences why the sky is blue." },
  { title: "Write a story", prompt: "Write a short story about a lighthouse keeper who finds a door in the sea." },
];

export function makeForm({ keyed, send, stop, connect, clear }) {
  const prompt = el("textarea", {
    id: "live-prompt",
    rows: 2,
    required: true,
    maxlength: 100_000,
    placeholder: "Ask something",
  });
  const drafter = el("select", { id: "live-drafter" });
  const number = (id, min, max, step, value) =>
    el("input", { id, type: "number", min, max, step, value, required: true });
  const temperature = number("live-temperature", 0, 100, "any", 0);
  const seed = number("live-seed", 0, 2 ** 53 - 1, 1, 7);
  const tokens = number("live-tokens", 2, 4096, 1, 160);
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
  const go = el("button", { type: "submit", class: "primary" }, "Send");
  const cancel = el("button", { type: "button", hidden: true, onclick: stop }, "Stop");
  let available = null;

  const element = el(
    "form",
    { class: "panel live-form", "aria-label": "Message" },
    keyed
      ? [
          field("API key", key),
          el(
            "p",
            { class: "note" },
            "The key stays in this page’s memory: it is sent to this server only and is gone when the page is closed.",
          ),
        ]
      : null,
    el("div", { class: "compose" }, el("label", { class: "hush", for: prompt.id }, "Message"), prompt, go, cancel),
    el(
      "details",
      {},
      el("summary", {}, "Settings"),
      el(
        "div",
        { class: "fields" },
        field("Drafter", drafter),
        field("Temperature", temperature),
        field("Seed", seed),
        field("Maximum tokens", tokens),
      ),
      about,
      el(
        "div",
        { class: "ticks" },
        tick("Record the target’s top five at every node (takes a little time)", full),
        tick("Continue the text without the chat template; every message by itself", raw),
        el("button", { type: "button", onclick: clear }, "New conversation"),
      ),
    ),
  );
  element.addEventListener("submit", (event) => (event.preventDefault(), send()));
  prompt.addEventListener(
    "keydown",
    (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && (event.preventDefault(), send()),
  );
  document.addEventListener("keydown", (event) => event.key === "Escape" && stop());
  drafter.addEventListener("change", describe);

  function describe() {
    about.textContent = available?.find((each) => each.id === drafter.value)?.about ?? "";
  }

  /** Show what GET /v1/drafters returned: drafters, the default first, and limits. */
  function setDrafters(list) {
    available = list.data.filter((each) => each.id !== "off");
    replace(
      drafter,
      available.length
        ? available.map((each) => el("option", { value: each.id, selected: each.default }, each.id))
        : el("option", { value: "off" }, "none: this server runs without a drafter"),
    );
    tokens.max = String(list.limits.max_tokens);
    temperature.max = String(list.limits.temperature);
    describe();
  }

  return {
    element,
    fill: (text) => (prompt.value = text),
    setDrafters,
    get key() {
      return key.value;
    },
    get connected() {
      return available !== null;
    },
    valid: () => element.reportValidity(),
    /** Stop works while something runs; Send already while only the plain run does. */
    running(on, racing = false) {
      cancel.hidden = !on && !racing;
      go.disabled = on;
    },
    settings: () => ({
      prompt: prompt.value,
      raw: raw.checked,
      temperature: Number(temperature.value),
      seed: Number(seed.value),
      tokens: Number(tokens.value),
      level: full.checked ? "full" : "summary",
      drafter: drafter.value,
    }),
  };
}

function field(label, input) {
  return el("div", { class: "field" }, el("label", { for: input.id }, label), input);
}

function tick(label, input) {
  return el("label", { class: "tick" }, input, ` ${label}`);
}
