#!/bin/sh
# Builds llama-server, llama-bench and llama-quantize in FOLDER/bin from the
# llama.cpp sources inside llama-cpp-python's source package.
#   benchmarks/peers/build_llamacpp.sh FOLDER [JOBS]
set -eu
VERSION=0.3.36
folder=$1
jobs=${2:-1}
mkdir -p "$folder"
cd "$folder"
python -m pip download --no-deps --no-binary llama-cpp-python \
    "llama-cpp-python==$VERSION"
tar xzf "llama_cpp_python-$VERSION.tar.gz"
cmake -S "llama_cpp_python-$VERSION/vendor/llama.cpp" -B build \
    -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=ON \
    -DLLAMA_BUILD_COMMIT="llama-cpp-python-$VERSION" -DLLAMA_OPENSSL=OFF \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
    -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF
cmake --build build -j "$jobs" --target llama-server llama-bench llama-quantize
ln -sfn build/bin bin
