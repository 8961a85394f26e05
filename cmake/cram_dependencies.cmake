# Finds every library once and stops with one line that names the missing package.
# "cram_deps_*" targets are the only way the rest of the build names a vendor library.

# (A message that starts with a blank is printed as it is; CMake would break the line otherwise.)
function(cram_missing package what)
  message(FATAL_ERROR " cram: ${what} not found: install the package ${package} (launch/bootstrap.sh installs all of them)")
endfunction()

# cram_header_library(<target> <package> <header> [LIBRARY <name>]): for packages without a CMake config.
function(cram_plain_library target package header)
  cmake_parse_arguments(ARG "" "LIBRARY" "" ${ARGN})
  string(MAKE_C_IDENTIFIER "CRAM_${target}" id)
  if(CMAKE_DISABLE_FIND_PACKAGE_${target})
    cram_missing(${package} ${header})
  endif()
  find_path(${id}_INCLUDE ${header})
  if(NOT ${id}_INCLUDE)
    cram_missing(${package} ${header})
  endif()
  add_library(${target} INTERFACE)
  target_include_directories(${target} SYSTEM INTERFACE ${${id}_INCLUDE})
  if(ARG_LIBRARY)
    find_library(${id}_LIBRARY ${ARG_LIBRARY})
    if(NOT ${id}_LIBRARY)
      cram_missing(${package} lib${ARG_LIBRARY})
    endif()
    target_link_libraries(${target} INTERFACE ${${id}_LIBRARY})
  endif()
endfunction()

find_package(Threads REQUIRED)

cram_plain_library(cram_deps_sentencepiece libsentencepiece-dev sentencepiece_processor.h LIBRARY sentencepiece)
find_library(CRAM_SENTENCEPIECE_TRAIN sentencepiece_train)
if(NOT CRAM_SENTENCEPIECE_TRAIN)
  cram_missing(libsentencepiece-dev libsentencepiece_train)
endif()
target_link_libraries(cram_deps_sentencepiece INTERFACE ${CRAM_SENTENCEPIECE_TRAIN})
cram_plain_library(cram_deps_utf8proc libutf8proc-dev utf8proc.h LIBRARY utf8proc)
cram_plain_library(cram_deps_zlib zlib1g-dev zlib.h LIBRARY z)
cram_plain_library(cram_deps_zstd libzstd-dev zstd.h LIBRARY zstd)
cram_plain_library(cram_deps_xxhash libxxhash-dev xxhash.h)
cram_plain_library(cram_deps_json nlohmann-json3-dev nlohmann/json.hpp)
cram_plain_library(cram_deps_toml libtomlplusplus-dev toml++/toml.h)
cram_plain_library(cram_deps_cxxopts libcxxopts-dev cxxopts.hpp)
# Its regular-expression parser overflows the stack on very long arguments, and commas belong to file names.
target_compile_definitions(cram_deps_cxxopts INTERFACE CXXOPTS_NO_REGEX "CXXOPTS_VECTOR_DELIMITER=char(0x1f)")

find_package(HDF5 COMPONENTS C)
if(NOT HDF5_FOUND)
  cram_missing(libhdf5-dev HDF5)
endif()
add_library(cram_deps_hdf5 INTERFACE)
target_include_directories(cram_deps_hdf5 SYSTEM INTERFACE ${HDF5_C_INCLUDE_DIRS})
target_link_libraries(cram_deps_hdf5 INTERFACE ${HDF5_C_LIBRARIES})

# The C interface only: the C++ bindings are deprecated.
find_package(MPI COMPONENTS C)
if(NOT MPI_C_FOUND)
  cram_missing("libopenmpi-dev and openmpi-bin" MPI)
endif()
add_library(cram_deps_mpi INTERFACE)
target_link_libraries(cram_deps_mpi INTERFACE MPI::MPI_C)
target_compile_definitions(cram_deps_mpi INTERFACE OMPI_SKIP_MPICXX MPICH_SKIP_MPICXX)

# LibTorch from the pinned Python wheel. A hand-made target, because find_package(Torch) of a CUDA wheel is fatal on a
# machine without the CUDA toolkit.
set(CRAM_PYTHON "${CMAKE_SOURCE_DIR}/.venv/bin/python" CACHE FILEPATH "Python that has the pinned torch")
set(CRAM_TORCH_VERSION 2.11.0)
execute_process(COMMAND ${CRAM_PYTHON} -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0], end='')"
                OUTPUT_VARIABLE CRAM_TORCH_ROOT RESULT_VARIABLE CRAM_TORCH_RESULT ERROR_QUIET)
if(NOT CRAM_TORCH_RESULT EQUAL 0 OR CMAKE_DISABLE_FIND_PACKAGE_Torch)
  cram_missing("torch==${CRAM_TORCH_VERSION} (pip)" "LibTorch (through ${CRAM_PYTHON})")
endif()
file(STRINGS "${CRAM_TORCH_ROOT}/version.py" CRAM_TORCH_VERSION_LINE REGEX "^__version__")
if(NOT CRAM_TORCH_VERSION_LINE MATCHES "${CRAM_TORCH_VERSION}")
  message(FATAL_ERROR " cram: expected torch ${CRAM_TORCH_VERSION}, got ${CRAM_TORCH_VERSION_LINE}: run launch/bootstrap.sh")
endif()

find_program(CRAM_NVCC nvcc PATHS /usr/local/cuda/bin)
set(CRAM_CUDA_DEFAULT OFF)
if(CRAM_NVCC)
  execute_process(COMMAND ${CRAM_NVCC} --version OUTPUT_VARIABLE CRAM_NVCC_VERSION ERROR_QUIET)
  if(CRAM_NVCC_VERSION MATCHES "release 13\\.")
    set(CRAM_CUDA_DEFAULT ON)
  endif()
endif()
option(CRAM_CUDA "Build for NVIDIA GPUs (needs the CUDA 13 toolkit)" ${CRAM_CUDA_DEFAULT})

add_library(cram_deps_torch INTERFACE)
target_include_directories(cram_deps_torch SYSTEM INTERFACE
  ${CRAM_TORCH_ROOT}/include ${CRAM_TORCH_ROOT}/include/torch/csrc/api/include)
target_link_directories(cram_deps_torch INTERFACE ${CRAM_TORCH_ROOT}/lib)
# at::parallel_for is a template: without OpenMP in our own files it runs on one thread, and says nothing. The wheel's
# libgomp, so that a process holds one.
target_compile_options(cram_deps_torch INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fopenmp>)
target_link_libraries(cram_deps_torch INTERFACE ${CRAM_TORCH_ROOT}/lib/libgomp.so.1)
if(CRAM_CUDA)
  find_package(CUDAToolkit 13)
  if(NOT CUDAToolkit_FOUND)
    message(FATAL_ERROR " cram: CRAM_CUDA=ON needs the CUDA 13 toolkit: install it or configure with -DCRAM_CUDA=OFF")
  endif()
  # Before the language is enabled, which would choose one itself.
  set(CMAKE_CUDA_ARCHITECTURES 80 90 CACHE STRING "GPU architectures to compile for")
  set(CMAKE_CUDA_COMPILER ${CRAM_NVCC} CACHE FILEPATH "CUDA compiler")
  enable_language(CUDA)
  # After it: what tests the compiler needs the toolkit's runtime, and programs link the wheel's.
  set(CMAKE_CUDA_RUNTIME_LIBRARY None)
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know that nvcc has C++20
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
  endif()
  target_compile_definitions(cram_deps_torch INTERFACE CRAM_CUDA=1)
  target_include_directories(cram_deps_torch SYSTEM INTERFACE ${CUDAToolkit_INCLUDE_DIRS})
  target_link_libraries(cram_deps_torch INTERFACE
    -Wl,--no-as-needed stdc++ torch torch_cpu torch_cuda c10 c10_cuda -Wl,--as-needed)
else()
  target_link_libraries(cram_deps_torch INTERFACE -Wl,--no-as-needed stdc++ -Wl,--as-needed torch_cpu c10)
endif()
# stdc++ comes first on purpose: libtorch.so exports parts of the C++ library it was built with (std::filesystem), and
# whoever is linked first wins; the wheel's remove_all() calls through a null pointer in a program built by GCC 12.
# The wheel's libraries find each other through their own RPATH; ours need the wheel and its NCCL.
set(CMAKE_BUILD_RPATH "${CRAM_TORCH_ROOT}/lib;${CRAM_TORCH_ROOT}/../nvidia/nccl/lib")

# The CUDA runtime and cuBLASLt from the wheel, so that a program holds one of each; headers are the toolkit's.
if(CRAM_CUDA)
  add_library(cram_deps_cuda INTERFACE)
  set(CRAM_CUDA_ROOT "${CRAM_TORCH_ROOT}/../nvidia/cu13/lib")
  if(NOT EXISTS "${CRAM_CUDA_ROOT}/libcublasLt.so.13")
    cram_missing("the CUDA 13 wheel of torch==${CRAM_TORCH_VERSION} (pip)" "libcublasLt.so.13 beside torch")
  endif()
  target_include_directories(cram_deps_cuda SYSTEM INTERFACE ${CUDAToolkit_INCLUDE_DIRS})
  target_link_libraries(cram_deps_cuda INTERFACE ${CRAM_CUDA_ROOT}/libcublasLt.so.13 ${CRAM_CUDA_ROOT}/libcudart.so.13)
endif()

# NCCL from the wheel as well. Without it (a CPU build) the backend refuses at run time.
add_library(cram_deps_nccl INTERFACE)
set(CRAM_NCCL_ROOT "${CRAM_TORCH_ROOT}/../nvidia/nccl")
if(CRAM_CUDA AND EXISTS "${CRAM_NCCL_ROOT}/include/nccl.h")
  target_compile_definitions(cram_deps_nccl INTERFACE CRAM_NCCL=1)
  target_include_directories(cram_deps_nccl SYSTEM INTERFACE ${CRAM_NCCL_ROOT}/include)
  target_link_libraries(cram_deps_nccl INTERFACE ${CRAM_NCCL_ROOT}/lib/libnccl.so.2 cram_deps_cuda)
endif()

if(NOT DEFINED CRAM_TESTS OR CRAM_TESTS)
  find_package(GTest)
  if(NOT GTest_FOUND)
    cram_missing(libgtest-dev GoogleTest)
  endif()
endif()
