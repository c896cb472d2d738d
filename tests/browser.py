"""A real browser for tests: Chromium as QtWebEngine brings it (requirements-browser.txt), without a screen, in its own process.

    python tests/browser.py PAGE.html [WIDTH [light|dark [PICTURE.png]]] < '["document.title"]'      one JSON object on stdout
"""

import json
import os
import subprocess
import sys
from pathlib import Path

HEIGHT = 1000


def why_none() -> str:
    """What an import of the browser says; empty if it works."""
    done = subprocess.run([sys.executable, "-c", "import PySide6.QtWebEngineWidgets"], capture_output=True, text=True)
    return done.stderr.strip().rpartition("\n")[2]


def browse(page: Path, scripts: list[str], width: int = 1200, scheme: str = "light") -> tuple[list, list]:
    """Load a page and evaluate scripts in it, one after the other. Returns their values, and what it wrote to the console."""
    command = [sys.executable, __file__, str(page), str(width), scheme]
    done = subprocess.run(command, input=json.dumps(scripts), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout)
    return answer["results"], answer["console"]


def main(page: str, width: str = "1200", scheme: str = "light", picture: str = "") -> None:
    flags = f"--no-sandbox --disable-gpu --blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"
    os.environ |= {"QT_QPA_PLATFORM": "offscreen", "QTWEBENGINE_CHROMIUM_FLAGS": flags}
    from PySide6.QtCore import QEventLoop, QTimer, QUrl
    from PySide6.QtWebEngineCore import QWebEnginePage
    from PySide6.QtWebEngineWidgets import QWebEngineView
    from PySide6.QtWidgets import QApplication

    console = []

    class Page(QWebEnginePage):
        def javaScriptConsoleMessage(self, level, message, line, source):
            console.append(f"{message} (line {line})")

    application = QApplication(["browser"])
    application.setQuitOnLastWindowClosed(False)
    view = QWebEngineView()
    view.setPage(Page(view))
    view.resize(int(width), HEIGHT)
    view.show()

    def wait(start) -> object:
        """Run the event loop until what `start` begins calls back; returns the last argument of the call."""
        loop, answers = QEventLoop(), []
        start(lambda *arguments: (answers.append(arguments[-1] if arguments else None), loop.quit()))
        if not answers:
            loop.exec()
        return answers[0]

    def load(done) -> None:
        view.loadFinished.connect(done)
        view.load(QUrl.fromLocalFile(str(Path(page).resolve())))

    def evaluate(script: str) -> object:
        return json.loads(wait(lambda done: view.page().runJavaScript(f"JSON.stringify({script})", done)) or "null")

    assert wait(load), f"{page} does not load"
    results = [evaluate(script) for script in json.load(sys.stdin)]
    if picture:
        view.resize(int(width), min(8000, evaluate("document.documentElement.scrollHeight")))
        wait(lambda done: QTimer.singleShot(1500, done))  # for its painting at the new size
        assert view.grab().save(picture), f"cannot write {picture}"
    print(json.dumps({"results": results, "console": console}))
    sys.stdout.flush()
    os._exit(0)  # Qt's own teardown warns about profiles released before their pages


if __name__ == "__main__":
    main(*sys.argv[1:])
