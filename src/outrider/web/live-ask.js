/* Asking the server: who drafts here, and one streamed answer with its own trace. It knows HTTP and no pixels.

   Whatever goes wrong becomes a Refusal whose message is a sentence for people: the server's own where it has one. The
   key lives in the caller's memory and goes to this page's own server only. */

export class Refusal extends Error {}

const UNREACHABLE = "The server cannot be reached: it may have been stopped. Start it again and reload this page.";

/** What GET /v1/drafters says: the drafters a request may name, the limits. */
export async function drafters(key) {
  const answer = await reach("v1/drafters", { headers: headers(key) });
  return answer.json();
}

/** Stream one request; `tell(chunk)` hears each chunk as it comes. An aborted signal ends it and frees its slots. */
export async function stream(path, body, { key, signal, tell }) {
  const answer = await reach(path, { method: "POST", headers: headers(key), body: JSON.stringify(body), signal });
  let finished = false;
  try {
    for await (const data of events(answer.body)) {
      if (data === "[DONE]") finished = true;
      else tell(refused(JSON.parse(data)));
    }
  } catch (error) {
    if (error instanceof Refusal || error.name === "AbortError") throw error;
    throw new Refusal(UNREACHABLE);
  }
  if (!finished) throw new Refusal("The server's answer broke off before its end.");
}

function headers(key) {
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

async function reach(path, options) {
  let answer;
  try {
    answer = await fetch(new URL(`/${path}`, location.href), { ...options, credentials: "omit", cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(UNREACHABLE);
  }
  if (answer.ok) return answer;
  let told = null;
  try {
    told = await answer.json();
  } catch {
    /* no sentence of the server's: the status has to do */
  }
  refused(told);
  throw new Refusal(`The server answered with status ${answer.status}.`);
}

/** What was said, unless it is an error in the server's form. */
function refused(said) {
  if (typeof said?.error?.message === "string") throw new Refusal(said.error.message);
  return said;
}

/** The data of server-sent events, as they come: one line each here. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
