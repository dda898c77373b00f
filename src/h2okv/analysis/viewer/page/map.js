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

  paint(trace) {
    const { view, canvas } = this;
    const rows = view.reading.layers.length * view.reading.heads;
    const height = Math.max(1, Math.min(8, Math.floor(480 / rows)));
    const width = Math.min(trace.length, 1000);
    if (canvas.width !== width || canvas.height !== rows * height) {
      canvas.width = width;
      canvas.height = rows * height;
    }
    const context = canvas.getContext("2d");
    const image = context.createImageData(width, rows * height);
    const style = getComputedStyle(document.documentElement);
    const [held, rest, mark] = ["--held", "--rest", "--window"].map((name) =>
      rgb(style.getPropertyValue(name)),
    );
    const paper = rgb(style.getPropertyValue("--paper"));
    const chosen = view.layer * view.reading.heads + view.head;
    for (let row = 0; row < rows; row += 1) {
      const gone = trace.gone.subarray(row * trace.length, (row + 1) * trace.length);
      for (let x = 0; x < width; x += 1) {
        const from = Math.floor((x * trace.length) / width);
        const to = Math.max(from + 1, Math.floor(((x + 1) * trace.length) / width));
        let read = 0;
        let kept = 0;
        for (let token = from; token < to && token <= view.step; token += 1) {
          read += 1;
          if (gone[token] > view.step + 1) kept += 1;
        }
        const part = kept / (read || 1);
        const colour = read ? rest.map((value, i) => value + (held[i] - value) * part) : paper;
        for (let y = 0; y < height; y += 1) {
          const edge = row === chosen && height > 2 && (y === 0 || y === height - 1);
          const [r, g, b] = edge ? mark : colour;
          const at = 4 * ((row * height + y) * width + x);
          image.data[at] = r;
          image.data[at + 1] = g;
          image.data[at + 2] = b;
          image.data[at + 3] = 255;
        }
      }
    }
    context.putImageData(image, 0, 0);
    canvas.setAttribute(
      "aria-label",
      `Which tokens each of ${rows} heads holds after step ${view.step + 1}, ${trace.packed.policy}`,
    );
  }
}

function rgb(text) {
  const number = parseInt(text.trim().slice(1), 16);
  return [number >> 16, (number >> 8) & 255, number & 255];
}
