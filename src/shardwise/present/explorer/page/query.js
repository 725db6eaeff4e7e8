// Addresses that people can read.

// A query with some keys of other values; null takes a key away.
export function edited(query, edit) {
  const parameters = new URLSearchParams(query);
  for (const [key, value] of Object.entries(edit)) {
    if (value === null) parameters.delete(key);
    else parameters.set(key, value);
  }
  return readable(parameters);
}

// Only what a query must escape is escaped.
function readable(parameters) {
  return parameters
    .toString()
    .replaceAll("%3D", "=")
    .replaceAll("%3A", ":")
    .replaceAll("%2C", ",")
    .replaceAll("%40", "@");
}
