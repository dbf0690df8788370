// Buttons that copy the text of the element that they name in data-copies.

async function copy(button) {
  const source = document.getElementById(button.dataset.copies);
  const said = document.getElementById("copied");
  try {
    await navigator.clipboard.writeText(source.textContent);
  } catch {
    const range = document.createRange(); // pages from other machines get no clipboard
    range.selectNodeContents(source);
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    document.execCommand("copy");
  }
  button.textContent = "Copied";
  said.textContent = "The line was copied";
  setTimeout(() => {
    button.textContent = "Copy";
    said.textContent = "";
  }, 2000);
}

for (const button of document.querySelectorAll("[data-copies]")) button.addEventListener("click", () => copy(button));
