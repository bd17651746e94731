# fathom_module(NAME SOURCES ... DEPS ...): one static library per module of src/, with only its allowed dependencies, so
# that a wrong link fails; tools/check_includes.py checks the includes. src/ and include/ are the only include roots.
function(fathom_module name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  add_library(fathom_${name} STATIC ${ARG_SOURCES})
  target_include_directories(fathom_${name} PUBLIC ${PROJECT_SOURCE_DIR}/include PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(fathom_${name} PRIVATE fathom_warnings PUBLIC ${ARG_DEPS})
  set_target_properties(fathom_${name} PROPERTIES POSITION_INDEPENDENT_CODE ON)
endfunction()

# fathom_test(NAME LABELS ... [SOURCES ...] [DEPS ...]): a GoogleTest program tests/NAME.cc, one ctest entry per test case.
function(fathom_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT" "LABELS;SOURCES;DEPS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  add_executable(${name} ${name}.cc ${ARG_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests)
  target_compile_definitions(${name} PRIVATE FATHOM_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  target_link_libraries(${name} PRIVATE fathom_warnings fathom::fathom GTest::gtest_main ${ARG_DEPS})
  gtest_discover_tests(${name} PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT} DISCOVERY_TIMEOUT 60)
endfunction()
