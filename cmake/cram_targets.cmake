# cram_add_library(<room> [TORCH] SOURCES ... DEPENDS ...): one static library a directory, include root src/.
# TORCH: the room sees LibTorch and shares the one precompiled header.
add_library(cram_pch OBJECT ${CMAKE_SOURCE_DIR}/cmake/pch.cpp)
target_precompile_headers(cram_pch PRIVATE <torch/types.h>)
target_link_libraries(cram_pch PRIVATE cram_deps_torch cram_warnings)

function(cram_use_torch target)
  target_link_libraries(${target} PUBLIC cram_deps_torch)
  target_precompile_headers(${target} REUSE_FROM cram_pch)
endfunction()

function(cram_add_library room)
  cmake_parse_arguments(ARG "TORCH" "" "SOURCES;DEPENDS;PRIVATE_DEPENDS" ${ARGN})
  add_library(cram_${room} STATIC ${ARG_SOURCES})
  target_include_directories(cram_${room} PUBLIC ${CMAKE_SOURCE_DIR}/src)
  target_link_libraries(cram_${room} PUBLIC ${ARG_DEPENDS} PRIVATE cram_warnings ${ARG_PRIVATE_DEPENDS})
  if(ARG_TORCH)
    cram_use_torch(cram_${room})
  endif()
endfunction()

# cram_add_program(<program> [TORCH] SOURCES ... DEPENDS ...): the target is <program>_program, since rooms have the
# short names (cram_data is the library, bin/cram_data the program).
function(cram_add_program name)
  cmake_parse_arguments(ARG "TORCH" "" "SOURCES;DEPENDS" ${ARGN})
  set(target ${name}_program)
  add_executable(${target} ${ARG_SOURCES})
  set_target_properties(${target} PROPERTIES OUTPUT_NAME ${name})
  target_link_libraries(${target} PRIVATE ${ARG_DEPENDS} cram_warnings cram_deps_cxxopts)
  if(ARG_TORCH)
    cram_use_torch(${target})
  endif()
endfunction()

# cram_add_test(<name> LABEL unit|parallel|crash|python|bench-smoke [TORCH] SOURCES ... DEPENDS ... [TIMEOUT s])
# One gtest program, one ctest entry.
function(cram_add_test name)
  cmake_parse_arguments(ARG "TORCH" "LABEL;TIMEOUT;PROCESSORS" "SOURCES;DEPENDS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  target_include_directories(${name} PRIVATE ${CMAKE_SOURCE_DIR}/tests)
  target_link_libraries(${name} PRIVATE ${ARG_DEPENDS} GTest::gtest GTest::gtest_main cram_warnings)
  target_compile_definitions(${name} PRIVATE
    CRAM_SOURCE_DIR="${CMAKE_SOURCE_DIR}" CRAM_PROGRAM_DIR="${CMAKE_BINARY_DIR}/bin" CRAM_PYTHON="${CRAM_PYTHON}")
  if(ARG_TORCH)
    cram_use_torch(${name})
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  if(NOT ARG_PROCESSORS)
    set(ARG_PROCESSORS 1)
  endif()
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES LABELS ${ARG_LABEL} TIMEOUT ${ARG_TIMEOUT} PROCESSORS ${ARG_PROCESSORS})
endfunction()

# cram_add_mpi_test(<name> RANKS 1 2 4 SOURCES ... DEPENDS ...): one program with its own main, one ctest entry for each
# number of ranks: <name>_np4. More ranks than cores, so they are neither bound nor allowed to spin for long.
function(cram_add_mpi_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT" "RANKS;SOURCES;DEPENDS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  target_include_directories(${name} PRIVATE ${CMAKE_SOURCE_DIR}/tests)
  target_link_libraries(${name} PRIVATE ${ARG_DEPENDS} GTest::gtest cram_warnings)
  target_compile_definitions(${name} PRIVATE CRAM_SOURCE_DIR="${CMAKE_SOURCE_DIR}")
  cram_use_torch(${name})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  foreach(ranks IN LISTS ARG_RANKS)
    add_test(NAME ${name}_np${ranks} COMMAND ${MPIEXEC_EXECUTABLE} --oversubscribe --bind-to none --timeout ${ARG_TIMEOUT}
             -np ${ranks} $<TARGET_FILE:${name}>)
    set_tests_properties(${name}_np${ranks} PROPERTIES LABELS parallel TIMEOUT ${ARG_TIMEOUT} PROCESSORS 2 ENVIRONMENT
      "OMP_NUM_THREADS=1;CRAM_TEST_RANKS=${ranks};OMPI_ALLOW_RUN_AS_ROOT=1;OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1;OMPI_MCA_mpi_yield_when_idle=1")
  endforeach()
endfunction()
