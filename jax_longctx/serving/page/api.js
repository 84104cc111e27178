// The servers' interface. Their API keys stay in sessionStorage, each for its own server.

export class ServerError extends Error {
  constructor(message, status = 0, param = null) {
    super(message);
    Object.assign(this, { status, param });
  }

  static from({ error = {} }, status) {
    return new ServerError(error.message ?? `the server answered ${status}`, status, error.param);
  }
}

// This page's own server first, then those that it may show beside.
export const servers = [];

export class Server {
  // `entry` is the server's model, once it is known.
  constructor(url) {
    this.url = url;
    this.entry = null;
  }

  get key() {
    return sessionStorage.getItem(`key ${this.url}`) ?? "";
  }

  set key(given) {
    sessionStorage.setItem(`key ${this.url}`, given);
  }

  get method() {
    return this.entry?.method?.name ?? new URL(this.url).host;
  }

  async fetch(path, options = {}) {
    const headers = new Headers(options.headers);
    if (this.key) headers.set("authorization", `Bearer ${this.key}`);
    let response;
    try {
      response = await fetch(this.url + path, { ...options, headers, credentials: "omit" });
    } catch (error) {
      if (options.signal?.aborted) throw error;
      throw new ServerError(`${this.url} does not answer, or not to this page`);
    }
    if (response.ok) return response;
    throw ServerError.from(await response.json().catch(() => ({})), response.status);
  }

  async get(path) {
    return (await this.fetch(path)).json();
  }

  post(path, body, signal) {
    const headers = { "content-type": "application/json" };
    return this.fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  }

  async meet() {
    this.entry = (await this.get("v1/models")).data[0];
  }

  // Bytes in use, and those of texts; null where the server does not say.
  async memory() {
    const page = await (await this.fetch("metrics")).text();
    const of = (name) => Number(page.match(new RegExp(`^longctx_${name} (\\S+)`, "m"))?.[1]);
    return { all: of("memory_bytes"), texts: of("context_bytes") };
  }

  // Reads documents, or a text; yields the progress, and the context at last.
  async *read({ files, text }, ttl, signal) {
    const more = ttl ? { ttl } : {};
    let sent;
    if (files) {
      const body = new FormData();
      for (const file of files) body.append("file", file, file.name);
      for (const [name, value] of Object.entries({ stream: true, ...more })) body.append(name, String(value));
      sent = this.fetch("v1/contexts", { method: "POST", body, signal });
    } else {
      // A form would change its ends of lines.
      sent = this.post("v1/contexts", { text, stream: true, ...more }, signal);
    }
    yield* events(await sent);
  }

  // A streamed answer's chunks.
  async *ask(body, signal) {
    const wanted = { ...body, model: this.entry.id, sources: true, stream: true };
    wanted.stream_options = { include_usage: true };
    yield* events(await this.post("v1/chat/completions", wanted, signal));
  }
}

// The records of a stream of server-sent events.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (let rest = ""; ; ) {
      const { value, done } = await reader.read();
      if (done) throw new ServerError("the server's answer broke off");
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.replace(/^data: /, "");
        if (data === "[DONE]") return;
        const record = JSON.parse(data);
        if (record.error) throw ServerError.from(record, 200);
        yield record;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
