// The state, which is the page's address, and questions about it. Only the last of the questions that wait is asked.

export class Store {
  constructor(query) {
    this.query = query;
    this.running = new Map();
    this.waiting = new Map();
  }

  // The address with some keys of other values; null takes a key away.
  edited(edit) {
    const found = new URLSearchParams(this.query);
    for (const [key, value] of Object.entries(edit)) {
      if (value === null) found.delete(key);
      else found.set(key, value);
    }
    return readable(found);
  }

  // What the page shows now. While a choice is dragged, the address and the history wait until it is released.
  take(query, { push = false, dragging = false } = {}) {
    this.query = query;
    if (dragging || location.search.slice(1) === query) return;
    history[push ? "pushState" : "replaceState"](null, "", `?${query}`);
  }

  // The answer to a question about a state, or null where a later one took its place.
  ask(question, query) {
    return new Promise((resolve) => {
      this.waiting.get(question)?.resolve(null);
      this.waiting.set(question, { query, resolve });
      if (!this.running.get(question)) this.next(question);
    });
  }

  async next(question) {
    const asked = this.waiting.get(question);
    if (!asked) return;
    this.waiting.delete(question);
    this.running.set(question, true);
    asked.resolve(await answer(question, asked.query));
    this.running.set(question, false);
    this.next(question);
  }
}

// What the server says, or the problems that it names.
export async function answer(question, query) {
  try {
    const found = await fetch(`/ask/${question}?${query}`);
    const payload = await found.json();
    return found.ok ? payload : { failed: payload.error.problems };
  } catch {
    return { failed: ["the explorer does not answer; start it again with `shardwise explore`"] };
  }
}

// An address that people can read: only what a query must escape is escaped.
function readable(parameters) {
  return parameters
    .toString()
    .replaceAll("%3D", "=")
    .replaceAll("%3A", ":")
    .replaceAll("%2C", ",")
    .replaceAll("%40", "@");
}
