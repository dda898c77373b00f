"use strict";
// All heads at a glance: one row for each, one column for some tokens, lit where they are held.

class HeadMap {
  constructor(canvas, view) {
    this.canvas = canvas;
    this.view = view;
    canvas.addEventListener("click", (event) => {
      const box = canvas.getBoundingClientRect();
      const rows = view.reading.layers.length * view.reading.heads;
      const row = Math.floor(((event.clientY - box.top) / box.height) * rows);
      const place = Math.max(0, Math.min(rows - 1, row));
      view.setHead(Math.floor(place / view.reading.heads), place % view.reading.heads);
    });
  }

  // Painted when the page has a moment: with all heads of a large model it takes longer than text.
  paint(trace) {
    this.fit(trace);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.draw(trace), 30);
  }

  // Its size at once, so that the text below does not move; a new size clears it.
  fit({ length }) {
    const { view, canvas } = this;
    const rows = view.reading.layers.length * view.reading.heads;
    const height = Math.max(1, Math.min(8, Math.floor(240 / rows)));
    const width = Math.min(length, 1000);
    if (canvas.width !== width) canvas.width = width;
    if (canvas.height !== rows * height) canvas.height = rows * height;
    return { rows, height, width };
  }

  draw(trace) {
    const { view, canvas } = this;
    const { step } = view;
    const { length, gone } = trace;
    const { rows, height, width } = this.fit(trace);
    const context = canvas.getContext("2d");
    const image = context.createImageData(width, rows * height);
    const pixels = new Uint32Array(image.data.buffer);
    const { shades, paper, mark } = colours();
    const chosen = view.layer * view.reading.heads + view.head;
    for (let row = 0; row < rows; row += 1) {
      const start = row * height * width;
      const from = row * length;
      for (let x = 0; x < width; x += 1) {
        const first = Math.floor((x * length) / width);
        const end = Math.min(step, Math.max(first, Math.floor(((x + 1) * length) / width) - 1));
        let kept = 0;
        for (let token = first; token <= end; token += 1) if (gone[from + token] > step + 1) kept += 1;
        pixels[start + x] = first > step ? paper : shades[Math.round((kept / (end - first + 1)) * 15)];
      }
      for (let y = 1; y < height; y += 1) pixels.copyWithin(start + y * width, start, start + width);
      if (row === chosen && height > 2) {
        pixels.fill(mark, start, start + width);
        pixels.fill(mark, start + (height - 1) * width, start + height * width);
      }
    }
    context.putImageData(image, 0, 0);
    canvas.setAttribute(
      "aria-label",
      `Which tokens each of ${rows} heads holds after step ${step + 1}, ${trace.packed.policy}`,
    );
  }
}

// The theme's colours as pixels: sixteen shades from nothing held to all held.
function colours() {
  const style = getComputedStyle(document.documentElement);
  const [held, rest, mark, paper] = ["--held", "--rest", "--window", "--paper"].map((name) =>
    rgb(style.getPropertyValue(name)),
  );
  const shades = Array.from({ length: 16 }, (_, i) =>
    pixel(rest.map((value, part) => value + ((held[part] - value) * i) / 15)),
  );
  return { shades, paper: pixel(paper), mark: pixel(mark) };
}

function pixel([r, g, b]) {
  const bytes = new Uint8Array([r, g, b, 255]);
  return new Uint32Array(bytes.buffer)[0];
}

function rgb(text) {
  const number = parseInt(text.trim().slice(1), 16);
  return [number >> 16, (number >> 8) & 255, number & 255];
}
