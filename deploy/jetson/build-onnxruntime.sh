#!/usr/bin/env bash
# Builds an onnxruntime-gpu wheel with code for Orin (sm_87) and Thor (sm_110), and with
# TensorRT, on a JetPack 7.2 machine or in its container. NVIDIA's and PyPI's wheels hold
# code for neither. Takes hours and about 12 GB of memory with JOBS=4.
#
#     ./build-onnxruntime.sh [FOLDER]      # the wheel ends up in FOLDER, default: .
set -euo pipefail

version=${ONNXRUNTIME_VERSION:-1.31.1}
architectures=${CUDA_ARCHITECTURES:-87;110}
jobs=${JOBS:-4}
output=$(realpath "${1:-.}")

source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
git clone --depth 1 --branch "v$version" --recurse-submodules --shallow-submodules \
    https://github.com/microsoft/onnxruntime "$source"
cd "$source"
# No reduced operator set: bundles use contrib operators and opset 24.
./build.sh --config Release --build_dir build --update --build --build_wheel \
    --parallel "$jobs" --nvcc_threads 1 --skip_tests --allow_running_as_root \
    --use_cuda --cuda_home /usr/local/cuda --cudnn_home /usr \
    --use_tensorrt --tensorrt_home /usr \
    --cmake_extra_defines "CMAKE_CUDA_ARCHITECTURES=$architectures" \
    onnxruntime_BUILD_UNIT_TESTS=OFF
mkdir -p "$output"
cp build/Release/dist/onnxruntime_gpu-*.whl "$output"
ls -l "$output"/onnxruntime_gpu-*.whl
