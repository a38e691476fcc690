/* The server's API: its drafters, and one streamed response with its own trace. It draws nothing.

   Every failure becomes a RequestError with a message for the user: the server's own where there is one. The key stays
   in the caller's memory and is sent to this page's own server only. */

export class RequestError extends Error {}

const UNREACHABLE = "The server cannot be reached: it may have been stopped. Start it again and reload this page.";

/** GET /v1/drafters: the drafters that a request may name, and the limits. */
export async function drafters(key) {
  const response = await request("v1/drafters", { headers: headers(key) });
  return response.json();
}

/** Stream one request; `onchunk(chunk)` is called for each chunk. Aborting the signal ends it and frees its slots. */
export async function stream(path, body, { key, signal, onchunk }) {
  const response = await request(path, { method: "POST", headers: headers(key), body: JSON.stringify(body), signal });
  let finished = false;
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") finished = true;
      else onchunk(checked(JSON.parse(data)));
    }
  } catch (error) {
    if (error instanceof RequestError || error.name === "AbortError") throw error;
    throw new RequestError(UNREACHABLE);
  }
  if (!finished) throw new RequestError("The server's response ended early.");
}

function headers(key) {
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

async function request(path, options) {
  let response;
  try {
    response = await fetch(new URL(`/${path}`, location.href), { ...options, credentials: "omit", cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestError(UNREACHABLE);
  }
  if (response.ok) return response;
  let body = null;
  try {
    body = await response.json();
  } catch {
    /* no message: the status has to do */
  }
  checked(body);
  throw new RequestError(`The server answered with status ${response.status}.`);
}

/** The body, unless it is an error in OpenAI's form. */
function checked(body) {
  if (typeof body?.error?.message === "string") throw new RequestError(body.error.message);
  return body;
}

/** The data of server-sent events as they arrive; this server sends one line each. */
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
