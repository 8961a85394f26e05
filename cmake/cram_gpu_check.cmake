# The component gpu_check, which no other installation includes: the programs and tests that bench/gpu_check.sh runs on a
# GPU machine, with the libraries they need. `bench/gpu_check.sh --bundle DIR` installs it and adds a corpus.
#
# Carried in lib/: every library of the programs that is not named below. Not carried, and found on the target:
# - LibTorch, its libgomp, CUDA, cuBLAS, cuDNN, NCCL: those of the target's PyTorch, of the version built with. They are
#   gigabytes, and a process must hold one of each.
# - the C library: its parts only work with the loader of the same version, which is the target's. So the target's must
#   be as new as this machine's; bundle.txt says which version that is.
# libstdc++ and libgcc_s are carried: the target's may be older than the compiler here. LibTorch and CUDA then use ours
# too, since a process has one libstdc++, and they can: it is backwards compatible, and they are built for far older ones.
# A newer one on the target is no reason to take that: nothing in the process was built with it. It stays first in the
# link order (cram_dependencies.cmake), so what libtorch.so exports of its own does not win here either.
#
# Libraries find each other through LD_LIBRARY_PATH, which the script sets for these programs alone: the RUNPATH of a program
# does not count for the libraries of its libraries.
if(NOT CRAM_TESTS)
  return()
endif()

set(programs cram_train_program cram_bench_program cram_data_program)
# (The CPU's kernel tests as well: a rehearsal without a GPU skips those of the GPU.)
set(tests cuda_kernels_test cuda_step_test fused_kernels_test kernels_test device_parity_test training_layouts_test nccl_test)
set_target_properties(${programs} ${tests} PROPERTIES INSTALL_RPATH "$ORIGIN/../lib")

install(TARGETS ${programs} RUNTIME_DEPENDENCY_SET cram_gpu_check
  RUNTIME DESTINATION bin COMPONENT gpu_check EXCLUDE_FROM_ALL)
install(TARGETS ${tests} RUNTIME_DEPENDENCY_SET cram_gpu_check
  RUNTIME DESTINATION tests COMPONENT gpu_check EXCLUDE_FROM_ALL)
install(RUNTIME_DEPENDENCY_SET cram_gpu_check
  PRE_EXCLUDE_REGEXES
    "^lib(torch|c10|shm|caffe2|gomp)"
    "^lib(cuda|cudart|cublas|cublasLt|cudnn|cufft|cufile|cupti|curand|cusolver|cusparse|cusparseLt|nccl|nvJitLink|nvrtc|nvshmem)[._-]"
    "^ld-linux" "^lib(c|m|pthread|dl|rt|util|resolv|anl|mvec|nss_.*)[.]so"
  LIBRARY DESTINATION lib COMPONENT gpu_check EXCLUDE_FROM_ALL)
install(PROGRAMS bench/gpu_check.sh DESTINATION bench COMPONENT gpu_check EXCLUDE_FROM_ALL)
install(FILES bench/torch_peer.py bench/torch_step.py DESTINATION bench COMPONENT gpu_check EXCLUDE_FROM_ALL)
install(FILES tests/reference/crammed_bert.py DESTINATION tests/reference COMPONENT gpu_check EXCLUDE_FROM_ALL)
install(FILES configs/demo.toml DESTINATION configs COMPONENT gpu_check EXCLUDE_FROM_ALL)
