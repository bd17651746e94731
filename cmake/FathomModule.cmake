# fathom_module(NAME SOURCES ... DEPS ... [HEADER_ONLY_DEPS ...]): one static library per module of src/, with only its
# allowed dependencies, so that a wrong link fails; tools/check_includes.py checks the includes. src/ and include/ are the
# only include roots. Who links an installed fathom needs its DEPS, but neither the HEADER_ONLY_DEPS nor our warnings.
function(fathom_module name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS;HEADER_ONLY_DEPS" ${ARGN})
  add_library(fathom_${name} STATIC ${ARG_SOURCES})
  target_compile_features(fathom_${name} PUBLIC cxx_std_20)
  target_include_directories(fathom_${name} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                                                   $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>
                                            PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(fathom_${name} PUBLIC ${ARG_DEPS})
  foreach(dep IN ITEMS fathom_warnings LISTS ARG_HEADER_ONLY_DEPS)
    target_link_libraries(fathom_${name} PRIVATE $<BUILD_INTERFACE:${dep}>)
  endforeach()
  set_target_properties(fathom_${name} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  set_property(GLOBAL APPEND PROPERTY FATHOM_MODULES fathom_${name})
endfunction()

# fathom_test(NAME LABELS ... [MAIN FILE] [SOURCES ...] [DEPS ...] [DISCOVER ...]): a GoogleTest program tests/NAME.cc, or
# of FILE, one ctest entry per test case. DISCOVER: further arguments of gtest_discover_tests.
function(fathom_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT;MAIN" "LABELS;SOURCES;DEPS;DISCOVER" ${ARGN})
  if(NOT ARG_MAIN)
    set(ARG_MAIN ${name}.cc)
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  add_executable(${name} ${ARG_MAIN} ${ARG_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests)
  target_compile_definitions(${name} PRIVATE FATHOM_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  target_link_libraries(${name} PRIVATE fathom_warnings fathom::fathom GTest::gtest_main ${ARG_DEPS})
  if(fast IN_LIST ARG_LABELS)
    set_property(GLOBAL APPEND PROPERTY FATHOM_FAST_TESTS ${name})
  endif()
  # Tests share the processors: a thread that spins while it waits takes the time of the one it waits for.
  gtest_discover_tests(${name} ${ARG_DISCOVER} PROPERTIES TIMEOUT ${ARG_TIMEOUT} ENVIRONMENT "OMP_WAIT_POLICY=passive"
                       DISCOVERY_TIMEOUT 60)
  # Labels by a file of their own: as a property above, the second label would be taken for the name of the next one.
  set(labels ${CMAKE_CURRENT_BINARY_DIR}/${name}_labels.cmake)
  file(WRITE ${labels} "if(${name}_TESTS)\n  set_tests_properties(\${${name}_TESTS} PROPERTIES LABELS \"${ARG_LABELS}\")\nendif()\n")
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${labels})
endfunction()

# fathom_cuda(NAME): the CUDA sources of a module. Code for compute capability 9.0, and PTX for every device from 8.0 on. The
# integer scans and packing promise the same bits as `ref`, so multiplies and adds are fused only where a kernel asks for it.
macro(fathom_enable_cuda)
  enable_language(CUDA)
  find_package(CUDAToolkit 12.4 REQUIRED)
  # CMake 3.25 does not know how to ask nvcc for C++20.
  if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
  endif()
endmacro()
function(fathom_cuda name)
  set_target_properties(fathom_${name} PROPERTIES CUDA_ARCHITECTURES "${FATHOM_CUDA_ARCHITECTURES}")
  target_compile_options(fathom_${name} PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:--fmad=false -Xcompiler=-Wall,-Wextra -Wno-deprecated-gpu-targets>
    $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${FATHOM_WERROR}>>:-Werror=all-warnings>)
endfunction()
