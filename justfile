# Commands of a developer; .ci/run runs the same ones on a fresh clone.

# Build and install into the active environment, editable
setup:
    pip install -e '.[test,lint]'

# Rebuild the op library after a change of C++
build:
    cmake --build build/editable

test *arguments:
    pytest {{arguments}}

lint:
    ruff check .
    ruff format --check .
    mypy
    lint-imports
    find backends tests/kernels -name '*.cc' -o -name '*.h' -o -name '*.inl' | xargs clang-format --dry-run --Werror
    check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
    zizmor --offline --quiet .github/workflows
    python sbom/check.py

format:
    ruff check --fix .
    ruff format .
    find backends tests/kernels -name '*.cc' -o -name '*.h' -o -name '*.inl' | xargs clang-format -i

# Kernel tests with AddressSanitizer and UndefinedBehaviorSanitizer
sanitize:
    .ci/run sanitizers

wheel:
    pip wheel --no-deps -w dist .
    python packaging/check_wheel.py dist/trivet-*.whl

# Compare with transformers and llama.cpp, in an environment of its own
oracle:
    .ci/run oracle

ci:
    .ci/run
