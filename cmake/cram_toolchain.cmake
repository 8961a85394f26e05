# Compiler settings shared by everything: warnings, ccache, mold, sanitizers.
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -g1 -DNDEBUG")
set(CMAKE_CXX_FLAGS_DEBUG "-O1 -g1")

find_program(CRAM_CCACHE ccache)
if(CRAM_CCACHE)
  # The precompiled header needs the sloppiness; without it every file misses.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${CRAM_CCACHE})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CRAM_CCACHE})
  add_compile_options($<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fpch-preprocess>)
endif()

find_program(CRAM_MOLD mold)
if(CRAM_MOLD)
  add_link_options(-fuse-ld=mold)
endif()

set(CRAM_SANITIZE "" CACHE STRING "Sanitizers to build with, for example address,undefined")
if(CRAM_SANITIZE)
  add_compile_options(-fsanitize=${CRAM_SANITIZE} -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${CRAM_SANITIZE})
endif()

add_library(cram_warnings INTERFACE)
target_compile_options(cram_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wconversion -Wshadow -Wnon-virtual-dtor -Werror>)
