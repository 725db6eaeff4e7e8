// Where a number of a payload is from: the entry of `fields` for its place, with the values of its inputs in the same payload.

const at = (payload, keys) => keys.reduce((value, key) => value?.[key], payload);

// What stands for each star of a pattern at a place; null where the place is no such one.
function stars(pattern, keys) {
  if (pattern.length !== keys.length || pattern.some((key, index) => key !== "*" && key !== keys[index])) return null;
  return keys.filter((_, index) => pattern[index] === "*");
}

function fieldOf(payload, keys) {
  for (const [place, field] of Object.entries(payload.fields ?? {})) {
    const standing = stars(place.split("."), keys);
    if (standing) return { field, standing };
  }
  return null;
}

// The provenance of the number at a place such as `roofline.operations.3.intensity`; null where the payload has none.
export function provenance(payload, place) {
  const keys = place.split(".");
  const match = fieldOf(payload, keys);
  if (!match) return null;
  const { field, standing } = match;
  const inputs = Object.entries(field.inputs).map(([symbol, pattern]) => {
    const left = [...standing];
    const input = pattern.split(".").map((key) => (key === "*" ? left.shift() : key));
    return { symbol, value: at(payload, input), unit: fieldOf(payload, input)?.field.unit ?? "", meaning: "" };
  });
  return { ...field, name: place, value: at(payload, keys), inputs, derived: [], interval90: null };
}
