"use strict";

{
  const data = document.getElementById("viewer-data");
  if (data !== null) {
    new BlockViewer(document.getElementById("viewer"), JSON.parse(data.textContent));
  }
  const copy = document.getElementById("copy");
  copy?.addEventListener("click", async () => {
    const commands = document.getElementById("commands");
    try {
      await navigator.clipboard.writeText(commands.textContent);
      copy.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(commands); // a page from a file may not write to the clipboard everywhere
    }
  });
}
