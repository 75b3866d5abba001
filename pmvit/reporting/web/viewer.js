"use strict";

/**
 * @typedef {Object} Block
 * @property {string} name Where it stands in the model.
 * @property {boolean} compressed Whether it runs on fewer tokens than it gets.
 * @property {[number, number]} grid Rows and columns.
 * @property {number[]} groups The group of each patch, -1 where it is pruned.
 * @property {number[]} centres The kept patch of each group.
 * @property {number} kept_in_mlp How many groups the MLP runs on.
 * @property {number} prefix Tokens before the patches.
 * @property {number[]} [weights] The weight of each patch in its group.
 * @property {number[]} [scores] The score of each patch.
 *
 * @typedef {{name: string, share: number}} Prediction
 * @typedef {{src: string, caption: string, label?: string, original?: Prediction, compressed?: Prediction, blocks?: Block[]}} Picture
 * @typedef {{blocks: Block[], reconstruct: string, images: Picture[]}} ViewerData `blocks` are those of all pictures; none if each has its own.
 */

const PRUNED = -1;

/** Shows what each block of a model keeps of an image, and what becomes of the patch under pointer or keyboard. */
class BlockViewer {
  /**
   * @param {HTMLElement} root The element of `viewer.html`.
   * @param {ViewerData} data
   */
  constructor(root, data) {
    this.root = root;
    /** @type {Block[]} */ this.blocks = [];
    /** @type {number[][][]} */ this.members = [];
    this.reconstruct = data.reconstruct;
    /** @type {Picture[]} */ this.pictures = [];
    this.block = 0;
    /** @type {number | null} */ this.patch = null;
    this.pinned = false;
    this.picture = 0;
    /** @type {HTMLImageElement | null} */ this.image = null;
    const find = (/** @type {string} */ selector) => root.querySelector(selector);
    this.canvas = /** @type {HTMLCanvasElement} */ (find(".block-view"));
    this.whole = /** @type {HTMLCanvasElement} */ (find(".whole-view"));
    this.caption = find("figure:first-child figcaption");
    this.slider = /** @type {HTMLInputElement} */ (find("input[type=range]"));
    this.output = find("output");
    this.tokens = find(".tokens");
    this.told = find(".told");
    this.trace = find(".trace");
    this.thumbs = find(".thumbs");
    this.byGroup = /** @type {HTMLInputElement} */ (find(".by-group"));
    this.slider.addEventListener("input", () => this.showBlock(Number(this.slider.value)));
    this.byGroup.addEventListener("change", () => this.draw());
    this.canvas.addEventListener("pointermove", (event) => this.pinned || this.choose(this.patchAt(event)));
    this.canvas.addEventListener("pointerleave", () => this.pinned || this.choose(null));
    this.canvas.addEventListener("click", (event) => this.pin(this.patchAt(event)));
    this.canvas.addEventListener("keydown", (event) => this.press(event));
    document.addEventListener("theme", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    for (const picture of data.images) this.add(picture);
    this.useBlocks(data.blocks);
    if (data.images.length > 0) this.showPicture(0);
    else this.whole.parentElement.hidden = true;
  }

  /** Adds a picture to choose from; returns its number. @param {Picture} picture */
  add(picture) {
    const number = this.pictures.push(picture) - 1;
    const button = document.createElement("button");
    button.type = "button";
    button.setAttribute("aria-pressed", "false");
    button.setAttribute("aria-label", picture.label ?? picture.caption);
    button.title = picture.caption;
    const thumb = document.createElement("img");
    thumb.src = picture.src;
    thumb.alt = "";
    button.append(thumb);
    button.addEventListener("click", () => this.showPicture(number));
    this.thumbs.append(button);
    this.thumbs.hidden = false;
    return number;
  }

  /** Shows these blocks; nothing while there are none. @param {Block[]} blocks */
  useBlocks(blocks) {
    this.blocks = blocks;
    this.members = blocks.map(membersOf);
    this.root.hidden = blocks.length === 0;
    this.slider.max = String(blocks.length - 1);
    if (blocks.length > 0) this.showBlock(this.block);
  }

  /** @param {number} number */
  async showPicture(number) {
    this.picture = number;
    const picture = this.pictures[number];
    [...this.thumbs.children].forEach((thumb, place) => thumb.setAttribute("aria-pressed", String(place === number)));
    const image = new Image();
    image.src = picture.src;
    await image.decode();
    if (this.picture !== number) return;
    this.image = image;
    this.whole.parentElement.hidden = false;
    if (picture.blocks) this.useBlocks(picture.blocks);
    this.caption.textContent = captionOf(picture);
    this.draw();
  }

  /** @param {number} number */
  showBlock(number) {
    const before = this.blocks[this.block];
    this.block = Math.max(0, Math.min(this.blocks.length - 1, number));
    const block = this.blocks[this.block];
    if (this.patch !== null) this.patch = samePlace(this.patch, before.grid, block.grid);
    this.slider.value = String(this.block);
    this.slider.setAttribute("aria-valuetext", `block ${this.block} of ${this.blocks.length}`);
    this.output.textContent = `${this.block} / ${this.blocks.length - 1}`;
    const pruned = block.groups.filter((group) => group === PRUNED).length;
    const kept = block.centres.length;
    const inMlp = block.kept_in_mlp < kept ? ` (${block.kept_in_mlp} in the MLP)` : "";
    const counts = `${kept} kept${inMlp}, ${block.groups.length - kept - pruned} merged, ${pruned} pruned`;
    const grid = `${block.grid[0]} × ${block.grid[1]} patches`;
    this.tokens.textContent = block.compressed ? `${grid}: ${counts}` : `${grid}, all of them kept: not compressed`;
    this.tell();
    this.draw();
  }

  /** @param {number | null} patch */
  choose(patch) {
    if (patch === this.patch) return;
    this.patch = patch;
    this.tell();
    this.draw();
  }

  /** A click keeps a patch chosen; a second one on it lets it go. @param {number | null} patch */
  pin(patch) {
    this.pinned = !(this.pinned && patch === this.patch);
    this.choose(patch);
  }

  /** @param {KeyboardEvent} event */
  press(event) {
    const [rows, columns] = this.blocks[this.block].grid;
    const at = this.patch ?? -1;
    const row = Math.floor(at / columns);
    const column = at % columns;
    const moves = {
      ArrowLeft: () => (column > 0 ? at - 1 : at),
      ArrowRight: () => (column < columns - 1 ? at + 1 : at),
      ArrowUp: () => (row > 0 ? at - columns : at),
      ArrowDown: () => (row < rows - 1 ? at + columns : at),
      Home: () => row * columns,
      End: () => row * columns + columns - 1,
    };
    if (event.key in moves) {
      this.pinned = true;
      this.choose(at < 0 ? 0 : moves[event.key]());
    } else if (event.key === "PageDown" || event.key === "PageUp") {
      this.showBlock(this.block + (event.key === "PageDown" ? 1 : -1));
    } else if (event.key === "Escape") {
      this.pinned = false;
      this.choose(null);
    } else return;
    event.preventDefault();
  }

  /** @param {MouseEvent} event */
  patchAt(event) {
    const [rows, columns] = this.blocks[this.block].grid;
    const box = this.canvas.getBoundingClientRect();
    const row = Math.floor(((event.clientY - box.top) / box.height) * rows);
    const column = Math.floor(((event.clientX - box.left) / box.width) * columns);
    return row >= 0 && row < rows && column >= 0 && column < columns ? row * columns + column : null;
  }

  /** Says in words what becomes of the chosen patch, in this block and in all others. */
  tell() {
    this.trace.replaceChildren();
    if (this.patch === null) {
      this.told.textContent = "Choose a patch to see its group, and how it is put back after the block.";
      return;
    }
    const block = this.blocks[this.block];
    const place = document.createElement("strong");
    place.textContent = `Patch ${placeOf(this.patch, block.grid)}.`;
    this.told.replaceChildren(place, ` ${this.story(this.patch)}`);
    this.blocks.forEach((other, number) => {
      const state = stateOf(other, samePlace(this.patch ?? 0, block.grid, other.grid));
      const item = document.createElement("li");
      item.className = state;
      item.textContent = String(number);
      item.title = `block ${number}: ${state}`;
      item.setAttribute("aria-label", item.title);
      if (number === this.block) item.setAttribute("aria-current", "step");
      this.trace.append(item);
    });
  }

  /** @param {number} patch */
  story(patch) {
    const block = this.blocks[this.block];
    const group = block.groups[patch];
    const score = block.scores ? ` Score ${block.scores[patch].toPrecision(2)}.` : "";
    if (group === PRUNED) {
      return `Pruned: block ${this.block} does not see it. It passes by and comes out as it went in.${score}`;
    }
    const members = this.members[this.block][group];
    const centre = block.centres[group];
    if (members.length === 1) {
      return `Kept: block ${this.block} computes it by itself, as one of ${block.centres.length} tokens.${score}`;
    }
    const role =
      patch === centre
        ? `Kept: it stands for a group of ${members.length}, merged in block ${this.block}.`
        : `In a group of ${members.length}, merged in block ${this.block} into the kept patch ${placeOf(centre, block.grid)}.`;
    const weight = block.weights ? ` Weight ${block.weights[patch].toPrecision(2)} in its group.` : "";
    const back =
      this.reconstruct === "residual"
        ? " Put back from the group's update: that is added to what the patch was."
        : " Put back as the group's result, times the patch's weight over the sum of their squares.";
    return role + weight + back + score;
  }

  /** Paints the block, the chosen group over it, and the picture that comes in beside it. */
  draw() {
    const { image } = this;
    if (this.blocks.length === 0) return;
    const ratio = image ? image.naturalHeight / image.naturalWidth : this.blocks[this.block].grid[0] / this.blocks[this.block].grid[1];
    const paint = sized(this.canvas, ratio);
    if (paint === null) return;
    const block = this.blocks[this.block];
    const [rows, columns] = block.grid;
    const { width, height } = this.canvas;
    const colours = coloursOf(this.canvas);
    const means = image ? meansOf(image, rows, columns) : null;
    paint.imageSmoothingEnabled = image !== null && image.naturalWidth > 64;
    if (image) paint.drawImage(image, 0, 0, width, height);
    const hatch = hatching(paint, colours);
    block.groups.forEach((group, patch) => {
      const box = boxOf(patch, block.grid, width, height);
      const state = stateOf(block, patch);
      const several = group !== PRUNED && this.members[this.block][group].length > 1;
      if (state === "pruned") {
        paint.fillStyle = colours.paper;
        paint.fillRect(...box);
        paint.fillStyle = hatch;
        paint.fillRect(...box);
      } else if (this.byGroup.checked && several) {
        paint.fillStyle = `hsl(${(group * 137.5) % 360} 65% ${state === "kept" ? 42 : 62}%)`;
        paint.fillRect(...box);
      } else if (state === "merged" && means) {
        paint.fillStyle = groupColour(this.members[this.block][group], means, block.weights);
        paint.fillRect(...box);
      } else if (!means) {
        paint.fillStyle = state === "kept" ? colours.kept : colours.merged;
        paint.fillRect(...box);
      }
    });
    if (!means) gridLines(paint, block.grid, colours.paper);
    this.drawChosen(paint, colours);
    if (image) this.drawWhole(image, colours);
  }

  /** @param {CanvasRenderingContext2D} paint @param {Colours} colours */
  drawChosen(paint, colours) {
    if (this.patch === null) return;
    const block = this.blocks[this.block];
    const group = block.groups[this.patch];
    const members = group === PRUNED ? [this.patch] : this.members[this.block][group];
    const { width, height } = this.canvas;
    paint.fillStyle = "rgb(0 0 0 / 45%)";
    block.groups.forEach((_, patch) => members.includes(patch) || paint.fillRect(...boxOf(patch, block.grid, width, height)));
    for (const patch of members) {
      const [x, y, w, h] = boxOf(patch, block.grid, width, height);
      outline(paint, [x, y, w, h], patch === this.patch ? 4 : 2, colours.chosen);
      if (group !== PRUNED && patch === block.centres[group] && members.length > 1) dot(paint, x + w / 2, y + h / 2, Math.min(w, h) / 6);
    }
  }

  /** @param {HTMLImageElement} image @param {Colours} colours */
  drawWhole(image, colours) {
    const paint = sized(this.whole, image.naturalHeight / image.naturalWidth);
    if (paint === null) return;
    const { width, height } = this.whole;
    paint.imageSmoothingEnabled = image.naturalWidth > 64;
    paint.drawImage(image, 0, 0, width, height);
    if (this.patch !== null) outline(paint, boxOf(this.patch, this.blocks[this.block].grid, width, height), 3, colours.chosen);
  }
}

/** @typedef {{paper: string, soft: string, kept: string, merged: string, chosen: string}} Colours */

/** The patches of each group. @param {Block} block */
function membersOf(block) {
  /** @type {number[][]} */
  const members = block.centres.map(() => []);
  block.groups.forEach((group, patch) => group === PRUNED || members[group].push(patch));
  return members;
}

/** @param {Block} block @param {number} patch */
function stateOf(block, patch) {
  const group = block.groups[patch];
  if (group === PRUNED) return "pruned";
  return block.centres[group] === patch ? "kept" : "merged";
}

/** Rows and columns are counted from 1. @param {number} patch @param {[number, number]} grid */
function placeOf(patch, grid) {
  return `row ${Math.floor(patch / grid[1]) + 1}, column ${(patch % grid[1]) + 1}`;
}

/** The patch of another grid over the middle of a patch. @param {number} patch @param {[number, number]} from @param {[number, number]} to */
function samePlace(patch, from, to) {
  const row = Math.floor(((Math.floor(patch / from[1]) + 0.5) / from[0]) * to[0]);
  const column = Math.floor((((patch % from[1]) + 0.5) / from[1]) * to[1]);
  return row * to[1] + column;
}

/** @param {Picture} picture */
function captionOf(picture) {
  const said = (/** @type {Prediction} */ one) => `${one.name} (${Math.round(100 * one.share)}\u00a0%)`;
  const parts = [picture.caption];
  if (picture.label) parts.push(`labelled ${picture.label}`);
  if (picture.original) parts.push(`original: ${said(picture.original)}`);
  if (picture.compressed) parts.push(`compressed: ${said(picture.compressed)}`);
  return parts.join("; ");
}

/** Gives a canvas the pixels of its place on the screen. @param {HTMLCanvasElement} canvas @param {number} ratio Height over width. */
function sized(canvas, ratio) {
  const width = Math.round(canvas.clientWidth * devicePixelRatio);
  if (width === 0) return null;
  canvas.width = width;
  canvas.height = Math.round(width * ratio);
  return canvas.getContext("2d");
}

/** Left, top, width and height of a patch, in whole pixels. @param {number} patch @param {[number, number]} grid @param {number} width @param {number} height @returns {[number, number, number, number]} */
function boxOf(patch, grid, width, height) {
  const row = Math.floor(patch / grid[1]);
  const column = patch % grid[1];
  const x = Math.round((column / grid[1]) * width);
  const y = Math.round((row / grid[0]) * height);
  return [x, y, Math.round(((column + 1) / grid[1]) * width) - x, Math.round(((row + 1) / grid[0]) * height) - y];
}

/** The mean colour of each patch: red, green, blue and alpha, one after the other. @param {HTMLImageElement} image @param {number} rows @param {number} columns */
function meansOf(image, rows, columns) {
  const small = new OffscreenCanvas(columns, rows).getContext("2d");
  small.imageSmoothingQuality = "high";
  small.drawImage(image, 0, 0, columns, rows);
  return small.getImageData(0, 0, columns, rows).data;
}

/** @param {number[]} members @param {Uint8ClampedArray} means @param {number[] | undefined} weights */
function groupColour(members, means, weights) {
  let total = 0;
  const sum = [0, 0, 0];
  for (const patch of members) {
    const weight = weights ? Math.abs(weights[patch]) : 1;
    total += weight;
    for (let channel = 0; channel < 3; channel += 1) sum[channel] += weight * means[4 * patch + channel];
  }
  return `rgb(${sum.map((value) => Math.round(value / (total || 1))).join(" ")})`;
}

/** @param {HTMLElement} element @returns {Colours} */
function coloursOf(element) {
  const probe = document.createElement("span");
  element.parentElement.append(probe);
  const read = (/** @type {string} */ name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  const colours = { paper: read("paper"), soft: read("soft"), kept: read("kept"), merged: read("merged"), chosen: "#ffb000" };
  probe.remove();
  return colours;
}

/** @param {CanvasRenderingContext2D} paint @param {Colours} colours */
function hatching(paint, colours) {
  const side = Math.round(6 * devicePixelRatio);
  const tile = new OffscreenCanvas(side, side);
  const pen = tile.getContext("2d");
  pen.strokeStyle = colours.soft;
  pen.globalAlpha = 0.55;
  pen.lineWidth = devicePixelRatio;
  for (const shift of [-side, 0, side]) {
    pen.moveTo(shift, side);
    pen.lineTo(shift + side, 0);
  }
  pen.stroke();
  return paint.createPattern(tile, "repeat");
}

/** @param {CanvasRenderingContext2D} paint @param {[number, number]} grid @param {string} colour */
function gridLines(paint, grid, colour) {
  paint.fillStyle = colour;
  const { width, height } = paint.canvas;
  for (let row = 1; row < grid[0]; row += 1) paint.fillRect(0, Math.round((row / grid[0]) * height), width, 1);
  for (let column = 1; column < grid[1]; column += 1) paint.fillRect(Math.round((column / grid[1]) * width), 0, 1, height);
}

/** @param {CanvasRenderingContext2D} paint @param {[number, number, number, number]} box @param {number} thickness @param {string} colour */
function outline(paint, box, thickness, colour) {
  const line = thickness * Math.max(1, devicePixelRatio / 1.5);
  paint.strokeStyle = colour;
  paint.lineWidth = line;
  paint.strokeRect(box[0] + line / 2, box[1] + line / 2, box[2] - line, box[3] - line);
}

/** @param {CanvasRenderingContext2D} paint @param {number} x @param {number} y @param {number} radius */
function dot(paint, x, y, radius) {
  paint.beginPath();
  paint.arc(x, y, radius, 0, 2 * Math.PI);
  paint.fillStyle = "#ffffff";
  paint.fill();
  paint.lineWidth = Math.max(1, radius / 3);
  paint.strokeStyle = "#000000";
  paint.stroke();
}
