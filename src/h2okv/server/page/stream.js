// What the server sends: events, however the network cuts them up, and errors in words.

/** What went wrong between the page and the server, in words for the person; `status` is 0 where nothing answers. */
class ServerError extends Error {
  constructor(words, status = 0) {
    super(words);
    this.status = status;
    /** Whether it concerns the server rather than one request. */
    this.isLasting = [0, 401, 502, 503, 504].includes(status);
  }
}

/** Yields the data of server-sent events, read as the HTML standard does, from a stream of bytes. */
async function* serverEvents(bytes) {
  const reader = bytes.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", data = [];
  try {
    for (let isOver = false; !isOver;) {
      const { value, done } = await reader.read().catch((error) => {
        if (error.name === "AbortError") { throw error; }
        throw new ServerError("The connection to the server broke.");
      });
      isOver = done;
      // A CR at the end may be half of a CRLF. An event that lacks its blank line at the very end is read all the same.
      const lines = (rest + (done ? "\n\n" : value)).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        const [, name, content] = /^([^:]*):? ?(.*)$/s.exec(line);
        if (name === "data") { data.push(content); }
        else if (!line && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => { /* it has broken already */ });
  }
}

/**
 * Yields a streamed answer's chunks; fails where the stream ends before the answer.
 *
 * An answer has ended with its `finish_reason`, or with `[DONE]`.
 */
async function* chunks(response) {
  const kind = response.headers.get("Content-Type") || "no type";
  if (!kind.startsWith("text/event-stream")) {
    throw new ServerError(`${response.url} answers with ${kind}, which is not an answer of h2okv.`, 404);
  }
  let hasEnded = false;
  for await (const data of serverEvents(response.body)) {
    if (data.trim() === "[DONE]") { return; }
    let chunk;
    try { chunk = JSON.parse(data); } catch { break; }  // the end of what came
    if (chunk?.error) { throw new ServerError(errorWords(chunk) || "The server reports an error.", 500); }
    hasEnded ||= Boolean(chunk?.choices?.[0]?.finish_reason);
    yield chunk ?? {};
  }
  if (!hasEnded) { throw new ServerError("The stream ended before the answer did.", 200); }
}

function errorWords(body) {
  const words = body?.error?.message ?? body?.error;
  return typeof words === "string" ? words : "";
}

/** Asks the server; whatever is not its answer is thrown as a `ServerError`. */
async function reach(path, key, options = {}) {
  const headers = { ...options.headers };
  // A header has bytes, so a key of other letters travels as UTF-8.
  if (key) { headers.Authorization = `Bearer ${String.fromCharCode(...new TextEncoder().encode(key))}`; }
  const response = await fetch(path, { ...options, headers }).catch((error) => {
    if (error.name === "AbortError") { throw error; }
    throw new ServerError(`The server at ${location.host} does not answer. Is it running? This page tries again by itself.`);
  });
  if (!response.ok) { throw await refusal(response, key); }
  return response;
}

async function refusal(response, key) {
  const { status, url } = response, words = errorWords(await response.json().catch(() => null));
  if (status === 401) {
    const what = key ? "The API key is wrong." : "The API key is missing: this server answers only with its key.";
    return new ServerError(`${what} Type it here.`, status);
  }
  if (words) { return new ServerError(words, status); }
  if (status === 404) {
    return new ServerError(`There is no h2okv server at ${url} (HTTP 404); look at the page's address.`, status);
  }
  if ([502, 503, 504].includes(status)) {
    return new ServerError(`A proxy answers, but the server behind it does not (HTTP ${status}).`, status);
  }
  return new ServerError(`The server refuses this with HTTP ${status} ${response.statusText}`.trim() + ".", status);
}

/** Reads the server's numbers, below a path. */
async function readStats(path, key) {
  const response = await reach(`${path}stats`, key), numbers = await response.json().catch(() => null);
  if (typeof numbers?.model === "string") { return numbers; }
  throw new ServerError(`What answers at ${response.url} is not an h2okv server; look at the page's address.`, 404);
}
